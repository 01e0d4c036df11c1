"""Stand-in for torchvision, whose builds bind to one build of torch, see ``absent``."""

import absent

__version__ = "0.28.0"
absent.install(__name__)
