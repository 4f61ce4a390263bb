"""Compile every variant of every kernel, without a GPU: did an edit change the machine code, and how?

python tools/machine_code.py > before.txt                       # then edit kernels/
python tools/machine_code.py --against before.txt               # exit status 1 if any variant differs
python tools/machine_code.py forward_sm90 MODE=MODE_TRAINING     # variants that have all of these words
python tools/machine_code.py --arch sm_80                       # for another architecture than sm_90a

Prints a line for each variant: a hash, registers per thread, bytes of stack per thread, instructions that write to the
stack (spills, and arrays that do not fit into registers), bytes of code, the kernel and its macros. The hash covers the
instructions, the constants that they read, and the properties of a launch: the parameters, the bytes of shared
memory, the registers, the stack, the size of a CTA and of a cluster. It does not cover what an edit of the source
changes without changing the code: names, line numbers, the digest of the folder, and the list of constants that the
compiler keeps although no instruction reads it.
"""

import argparse
import hashlib
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gsbn._cuda import kernels as _kernels
from gsbn._plan.sm90_variants import ARCH

REGISTERS, STACK = 0x2F, 0x12  # attributes of a cubin: the symbol of a function, and the value
LAUNCH = {0x05, 0x10, 0x17, 0x19, 0x3D, 0x3E}  # threads of a CTA, least CTAs on an SM, parameters, cluster
STORE_TO_STACK = 0x387  # STL, in the lowest 12 bits of an instruction's 16 bytes


def sections(cubin):
    """The name, the bytes and the size of each section of an ELF file; a section may have a size but no bytes."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    for name, kind, _, _, at, size, *_ in headers:
        start = headers[names][4] + name
        no_bits = kind == 8
        yield cubin[start : cubin.index(b"\0", start)].decode(), b"" if no_bits else cubin[at : at + size], size


def attributes(info):
    """The numbers and the bytes of the attributes in a section .nv.info."""
    at = 0
    while at < len(info):
        form, number, value = struct.unpack_from("<BBH", info, at)
        size = value if form == 4 else 0  # other forms have the value in place of the size
        yield number, info[at + 4 : at + 4 + size] or info[at + 2 : at + 4]
        at += 4 + size


def measure(cubin, kernel):
    """The columns of a kernel in a cubin: hash, registers, stack, stores to it, bytes of code."""
    found = {name: (data, size) for name, data, size in sections(cubin)}
    symbols, names = found[".symtab"][0], found[".strtab"][0]
    of_function = {}
    for number, value in attributes(found[".nv.info"][0]):
        if number in (REGISTERS, STACK):
            symbol, amount = struct.unpack("<II", value)
            (start,) = struct.unpack_from("<I", symbols, 24 * symbol)
            of_function[number, names[start : names.index(b"\0", start)].decode()] = amount
    registers, stack = of_function[REGISTERS, kernel], of_function[STACK, kernel]
    code, _ = found[f".text.{kernel}"]
    stores = sum(word & 0xFFF == STORE_TO_STACK for (word,) in struct.iter_unpack("<H14x", code))

    parts = [code, repr((registers, stack)).encode()]
    parts += [repr(of).encode() for of in sorted(attributes(found[f".nv.info.{kernel}"][0])) if of[0] in LAUNCH]
    for name, (data, size) in sorted(found.items()):
        if name.startswith((".nv.constant", ".nv.shared")) and name.endswith("." + kernel):
            parts.append(f"{name} {size}".encode() + data)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12], registers, stack, stores, len(code)


def compare(before, now):
    """Print the variants that changed; return whether none did."""
    same = [name for name in now if before.get(name, "")[:1] == now[name][:1]]
    for name in sorted(now.keys() - same):
        if name not in before:
            print(f"new: {name}")
            continue
        pairs = zip(("registers", "stack", "stores", "bytes"), before[name][1:], now[name][1:], strict=True)
        print(f"differs: {name}:", ", ".join(f"{what} {a}" + f" -> {b}" * (a != b) for what, a, b in pairs))
    for name in before.keys() - now.keys():
        print(f"gone: {name}")
    print(f"{len(same)} of {len(now)} variants have the same machine code")
    return len(same) == len(now) == len(before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only variants that have all of these words")
    parser.add_argument("--arch", default=ARCH)
    parser.add_argument("--against", type=Path, metavar="FILE", help="the output of an earlier run")
    args = parser.parse_args()

    def chosen(name):
        return set(args.words) <= set(name.split())

    names = {k: " ".join((k.name, *(f"{macro}={value}" for macro, value in k.defines))) for k in _kernels.all_kernels()}
    kernels = [kernel for kernel in _kernels.all_kernels(args.arch) if chosen(names[kernel])]
    cubins = _kernels.compile_all(args.arch, kernels)
    now = {names[kernel]: list(map(str, measure(cubin, kernel.name))) for kernel, cubin in cubins.items()}
    if args.against is None:
        for name, columns in now.items():
            print(*columns, name)
        return 0
    lines = (line.split(maxsplit=5) for line in args.against.read_text().splitlines())
    before = {name.strip(): columns for *columns, name in lines if chosen(name)}
    return 0 if compare(before, now) else 1


if __name__ == "__main__":
    sys.exit(main())
