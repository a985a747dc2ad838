"""Place the machine code of an object file in memory, where it stays until the process ends.

LLVM's linker can do it everywhere, but importing llvmlite takes 80 ms and 46 MiB, as long as
opening a small model. ELF files for x86-64 whose relocations are all addresses are placed here.
"""

import ctypes
import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tgen.errors import TgenError

# https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html
_ELF64, _X86_64 = b"\x7fELF\x02\x01", 62
_CONTENT, _SYMBOLS, _RELOCATIONS, _OTHER_RELOCATIONS = 1, 2, 4, 9  # kinds of sections
_WRITABLE, _IN_MEMORY = 1, 2  # flags of sections
_ABSOLUTE_ADDRESS = 1  # R_X86_64_64


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int  # bytes from the beginning of the file
    size: int
    link: int  # the section with a symbol's name, or with the symbol of a relocation
    info: int  # the section that a relocation changes
    alignment: int
    entry_size: int


class _Address(NamedTuple):
    number: int
    in_file: bool  # an offset, to which the file's place in memory is added


_linkers: list[object] = []  # own the machine code that LLVM placed


def place(code: bytes, name: str) -> int:
    """Place an object file; return the address of its function `name`.

    Raises TgenError if the system does not allow it, and MemoryError.
    """
    parsed = _parse_elf(code)
    if parsed is None:
        return _place_with_llvm(code, name)
    symbols, changes = parsed
    return _copy(code, changes) + symbols[name].number


def _parse_elf(code: bytes) -> tuple[dict[str, _Address], dict[int, _Address]] | None:
    """Return the symbols, and the addresses to write at offsets of a file that is copied as it is;
    None if it needs more than addresses of its read-only sections and of the C library."""
    if not code.startswith(_ELF64) or code[18] != _X86_64:
        return None
    (table,), (n_sections,) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<H", code, 60)
    entries = struct.iter_unpack("<2I4Q2I2Q", code[table : table + 64 * n_sections])
    sections = [_Section(*entry) for entry in entries]
    for one in sections:
        is_data = one.kind != _CONTENT or one.flags & _WRITABLE
        if one.kind == _OTHER_RELOCATIONS or (one.flags & _IN_MEMORY and is_data):
            return None
    (table_of_symbols,) = (one for one in sections if one.kind == _SYMBOLS)
    libc, symbols, by_number = ctypes.CDLL(None), {}, []
    for text, _, _, section, value, _ in _entries(code, table_of_symbols, "<I2BH2Q"):
        start = sections[table_of_symbols.link].offset + text
        symbol, address = code[start : code.index(0, start)].decode(), None
        if 0 < section < n_sections:
            symbols[symbol] = address = _Address(sections[section].offset + value, True)
        elif symbol and section == 0 and (function := getattr(libc, symbol, None)):
            address = _Address(ctypes.cast(function, ctypes.c_void_p).value or 0, False)
        by_number.append(address)
    changes = {}
    for relocations in (one for one in sections if one.kind == _RELOCATIONS):
        changed = sections[relocations.info].offset
        for at, kind, number, addend in _entries(code, relocations, "<QIIq"):
            address = by_number[number]
            if kind != _ABSOLUTE_ADDRESS or address is None:
                return None
            changes[changed + at] = address._replace(number=address.number + addend)
    return symbols, changes


def _entries(code: bytes, section: _Section, layout: str) -> Iterator[tuple[int, ...]]:
    return struct.iter_unpack(layout, code[section.offset : section.offset + section.size])


def _copy(code: bytes, changes: dict[int, _Address]) -> int:
    """Copy a file to executable memory with its addresses changed; return where it begins."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    base = libc.mmap(None, len(code), writable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base == ctypes.c_void_p(-1).value:
        raise MemoryError
    placed = bytearray(code)
    for offset, address in changes.items():
        struct.pack_into("<Q", placed, offset, address.number + base * address.in_file)
    ctypes.memmove(base, bytes(placed), len(placed))
    executable = mmap.PROT_READ | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(code)), executable):
        raise TgenError(
            "this system does not allow machine code that is made at run time",
            "set TGEN_KERNELS=0 to compute with torch",
        )
    return int(base)


def _place_with_llvm(code: bytes, name: str) -> int:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    _linkers.append(linker)
    return int(linker.get_function_address(name))
