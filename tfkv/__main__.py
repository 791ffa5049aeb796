"""``python -m tfkv`` is the `tfkv` command."""

from tfkv.cli import main

if __name__ == "__main__":
    main()
