"""``python -m dilated_attention_pytorch`` is the command ``dilated-attention``."""

from dilated_attention_command import main

if __name__ == "__main__":
    main()
