"""Training that survives: data, settings, the loop, checkpoints and scores."""

from dilated_attention_pytorch.training.checkpoint import Checkpoints, SaveError
from dilated_attention_pytorch.training.data import Corpus, Windows
from dilated_attention_pytorch.training.files import DataError
from dilated_attention_pytorch.training.log import read_log
from dilated_attention_pytorch.training.loop import LossError, Trainer, TrainPoint
from dilated_attention_pytorch.training.score import ScoreBins, load_decoder, log_probabilities
from dilated_attention_pytorch.training.settings import TrainSettings

__all__ = [
    "Checkpoints",
    "Corpus",
    "DataError",
    "LossError",
    "SaveError",
    "ScoreBins",
    "TrainPoint",
    "TrainSettings",
    "Trainer",
    "Windows",
    "load_decoder",
    "log_probabilities",
    "read_log",
]
