"""python -m torch_hicache: the same as the command `hicache`."""

import sys

from torch_hicache.cli import main

sys.exit(main())
