"""Adapters of environment libraries, one module each; a module imports its library when it makes an environment."""
