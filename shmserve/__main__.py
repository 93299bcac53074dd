"""`python -m shmserve`."""

from shmserve.cli import main

raise SystemExit(main())
