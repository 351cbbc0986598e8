"""python -m deepcontrol"""

import sys

from .cli import main

sys.exit(main())
