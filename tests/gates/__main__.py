import sys

from tests.gates import main

sys.exit(main(sys.argv[1:]))
