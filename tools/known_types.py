"""Read the output of ``pyright --verifytypes --outputjson``; end with an error if too few public types are known.

Classes of `gsbn.torch` with a base class from torch do not count: the checkers run without torch, and say nothing about
such a class but that its type is not known.
"""

import json
import sys

LEAST = 0.99

symbols = [symbol for symbol in json.load(sys.stdin)["typeCompleteness"]["symbols"] if symbol["isExported"]]
unknown = [symbol["name"] for symbol in symbols if not symbol["isTypeKnown"] and symbol["diagnostics"]]
score = 1 - len(unknown) / len(symbols)
print(f"{score:.1%} of the public types are known")
if score < LEAST:
    sys.exit("\n".join([*unknown, f"known_types: expected at least {LEAST:.0%}"]))
