"""Fetch the genomes that the benchmarks read: three Debian packages with examples, of which four files are kept.

The packages come from Debian's mirror, and their SHA-256 sums are compared before anything is unpacked. The number of bases
of each genome is compared too. Nothing is fetched that is already there.

    bowtie-examples   E. coli 536 (NC_008253), 4,938,920 bases
    ragout-examples   E. coli K-12 MG1655, 4,639,675 bases
    smalt-examples    human chromosome X to base 69,999,930, and P. falciparum, 23,264,425 bases
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import tarfile
import urllib.request
from pathlib import Path

MIRROR = "https://deb.debian.org/debian/pool/main"
PACKAGES = {
    "b/bowtie/bowtie-examples_1.3.1-1_all.deb": (
        "3cec5c9f6460ea2236cf3d2688665328ab18d90eb2f8eaa0183dd1cd05c212ee",
        {"usr/share/doc/bowtie/examples/genomes/NC_008253.fna.gz": 4_938_920},
    ),
    "r/ragout/ragout-examples_2.3-4_all.deb": (
        "cbe6d0dd8b0e36ef2c93c9b9655955f42019dcd9e9b77388ee58ee54d50bd140",
        {"usr/share/doc/ragout/examples/E.Coli/references/MG1655-K12.fasta.gz": 4_639_675},
    ),
    "s/smalt/smalt-examples_0.7.6-12_all.deb": (
        "ffb01b7ff91cd29bd45c980cdeea90d986146dd2e907fd9e365d3a8fa75b0751",
        {
            "usr/share/doc/smalt/test/data/hs37chrXtrunc.fa.gz": 69_999_930,
            "usr/share/doc/smalt/test/data/genome_1.fa.gz": 23_264_425,
        },
    ),
}


def bases(content: bytes) -> int:
    lines = gzip.decompress(content).split(b"\n")
    return sum(len(line.strip()) for line in lines if not line.startswith(b">"))


def member(package: bytes, name: str) -> bytes:
    """A file of an archive of ``ar``, which a Debian package is: headers of 60 bytes, content at even positions."""
    position = 8
    while position < len(package):
        header = package[position : position + 60]
        size = int(header[48:58])
        if header[:16].decode().strip().rstrip("/") == name:
            return package[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
    raise SystemExit(f"the package has no {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data"), help="the folder for the genomes")
    parser.add_argument("--mirror", default=MIRROR)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path, (digest, files) in PACKAGES.items():
        if all((options.out / Path(name).name).exists() for name in files):
            continue
        with urllib.request.urlopen(f"{options.mirror}/{path}", timeout=600) as answer:
            package = answer.read()
        if hashlib.sha256(package).hexdigest() != digest:
            raise SystemExit(f"{options.mirror}/{path} does not have the expected SHA-256 sum {digest}; nothing was kept")
        file = io.BytesIO(member(package, "data.tar.xz"))
        with tarfile.open(fileobj=file) as archive:
            for name, expected in files.items():
                found = archive.extractfile(f"./{name}")
                content = b"" if found is None else found.read()
                count = bases(content)
                if count != expected:
                    raise SystemExit(f"{name} has {count} bases instead of {expected}")
                (options.out / Path(name).name).write_bytes(content)
                print(json.dumps({"file": str(options.out / Path(name).name), "bytes": len(content), "bases": count}))


if __name__ == "__main__":
    main()
