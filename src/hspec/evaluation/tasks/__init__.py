# NOTE for the helper on tasks: this package was written in the meantime (task.py, files.py, catalogue.py, long_context.py and
# their tests); keep its names and behaviour. Left for you: the JSONL data (16 a family, keep ids unique), packages.py (prompts
# inside PyPI wheels, hooked into catalogue._one), docs/tasks.md. Remove this note when you have read it.
