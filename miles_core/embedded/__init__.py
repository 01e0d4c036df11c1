"""The backend that ships with the core: a Transformers model as engine and trainer."""
