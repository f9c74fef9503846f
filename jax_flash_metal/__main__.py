"""The command line: `python -m jax_flash_metal doctor`."""

from __future__ import annotations

import sys

from jax_flash_metal import doctor

if __name__ == "__main__":
    sys.exit(doctor.main())
