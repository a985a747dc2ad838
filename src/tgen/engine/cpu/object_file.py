"""Place the machine code of an object file in memory, where it stays until the process ends.

LLVM's linker could do it everywhere, but importing llvmlite takes as long as opening a small model
and more memory. ELF files for x86-64, which ask for nothing but addresses, are placed here.
"""

import ctypes
import mmap
import struct
from typing import NamedTuple

# https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html
_ELF64, _X86_64 = b"\x7fELF\x02\x01", 62
_SYMBOLS, _RELOCATIONS = 2, 4  # kinds of sections
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


_linkers: list[object] = []  # own the machine code that LLVM placed


def place(code: bytes, name: str) -> int:
    """Place an object file; return the address of its function `name`."""
    return _place_elf(code, name) or _place_with_llvm(code, name)


def _place_elf(code: bytes, name: str) -> int | None:
    """Copy the whole file, as its offsets are aligned, and write addresses where it asks for them.
    None if it asks for more, or if the system does not allow to execute the copy."""
    if not code.startswith(_ELF64) or code[18] != _X86_64:
        return None
    (table,), (n_sections,) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<H", code, 60)
    entries = struct.iter_unpack("<2I4Q2I2Q", code[table : table + 64 * n_sections])
    sections = [_Section(*entry) for entry in entries]
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    base = libc.mmap(None, len(code), writable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    placed = (ctypes.c_char * len(code)).from_address(base)
    placed.raw = code

    symbols = next(section for section in sections if section.kind == _SYMBOLS)
    addresses, named = [], {}
    for text, _, _, section, value, _ in struct.iter_unpack("<I2BH2Q", _content(code, symbols)):
        start = sections[symbols.link].offset + text
        symbol = code[start : code.index(0, start)].decode()
        if 0 < section < n_sections:
            named[symbol] = base + sections[section].offset + value
        elif section == 0 and symbol:
            named[symbol] = ctypes.cast(getattr(libc, symbol), ctypes.c_void_p).value
        addresses.append(named.get(symbol, 0))
    for changes in (section for section in sections if section.kind == _RELOCATIONS):
        for at, kind, symbol, addend in struct.iter_unpack("<QIIq", _content(code, changes)):
            if kind != _ABSOLUTE_ADDRESS:
                return None
            address = addresses[symbol] + addend
            struct.pack_into("<Q", placed, sections[changes.info].offset + at, address)
    executable = mmap.PROT_READ | mmap.PROT_EXEC
    refused = libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(code)), executable)
    return None if refused else named[name]


def _content(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.size]


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
