"""`python -m kvtier_services.demo [--json]`."""

import sys

from kvtier_services.demo.play import main

sys.exit(main(sys.argv[1:]))
