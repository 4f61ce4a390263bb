"""Read the output of ``pyright --verifytypes --outputjson``; end with an error if too few public types are known.

The unknown ones are classes of `gsbn.torch` with a base class from torch, because the checkers run without torch.
"""

import json
import sys

LEAST = 0.99

found = json.load(sys.stdin)["typeCompleteness"]
score = found["completenessScore"]
print(f"{score:.1%} of the public types are known")
if score < LEAST:
    for symbol in found["symbols"]:
        if symbol["isExported"] and not symbol["isTypeKnown"]:
            print(symbol["name"])
    sys.exit(f"known_types: expected at least {LEAST:.0%}")
