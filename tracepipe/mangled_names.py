"""Demangles the names of C++ functions, with their parameters or without: the Itanium ABI's grammar, as
compilers of kernels use it.

    _ZN2at6native4copyILi4EZNS_4fillEiEUlvE_EEviT0_    at::native::copy<4, at::fill(int)::{lambda()#1}>
      └ nested name ──┘└─ template arguments ┘ └ return type and parameters

A part of a name may refer to an earlier part, so that the result may be far longer than the name. What is not
in this grammar, or becomes too long, stays mangled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tracepipe.kernel_names import remembered

_LENGTH_MAX: Final = 1 << 13
_DEPTH_MAX: Final = 64
_TYPES: Final = {
    "v": "void", "w": "wchar_t", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char",
    "s": "short", "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long",
    "x": "long long", "y": "unsigned long long", "n": "__int128", "o": "unsigned __int128", "f": "float",
    "d": "double", "e": "long double", "g": "__float128", "z": "...", "Dn": "decltype(nullptr)",
    "Dh": "_Float16", "Ds": "char16_t", "Di": "char32_t", "Du": "char8_t", "DF16_": "_Float16",
    "DF16b": "std::bfloat16_t",
}  # fmt: skip
_SUFFIXES: Final = {
    "int": "", "unsigned int": "u", "long": "l", "unsigned long": "ul", "long long": "ll",
    "unsigned long long": "ull",
}  # fmt: skip
_STANDARD: Final = {
    "St": "std", "Sa": "std::allocator", "Sb": "std::basic_string", "Ss": "std::string",
    "Si": "std::istream", "So": "std::ostream", "Sd": "std::iostream",
}  # fmt: skip
_OPERATORS: Final = {
    "cl": "()", "ix": "[]", "pl": "+", "mi": "-", "ml": "*", "dv": "/", "rm": "%", "eq": "==", "ne": "!=",
    "lt": "<", "gt": ">", "le": "<=", "ge": ">=", "ss": "<=>", "nt": "!", "aa": "&&", "oo": "||", "aS": "=",
    "pL": "+=", "mI": "-=", "mL": "*=", "dV": "/=", "ls": "<<", "rs": ">>", "an": "&", "or": "|", "eo": "^",
    "co": "~", "pt": "->", "de": "*", "ad": "&", "pp": "++", "mm": "--", "cm": ",", "ng": "-",
    "nw": " new", "dl": " delete",
}  # fmt: skip


class _UnknownError(Exception):
    """Something that is not in this grammar."""


_Type = tuple[str, str]
"""What is before a name of that type, and what is after it: `int (*` and `)[4]`."""


class _Mangled:
    """A mangled name and a place in it. `substitutes` are the parts to which later parts refer."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.substitutes: list[_Type] = []
        self.arguments: list[str] = []
        """The template arguments of the function, to which its parameters refer."""
        self.in_lambda = False
        self.is_template = self.has_no_result = False
        self.after = ""

    def has(self, *texts: str) -> str:
        """Take the first of these texts that follows; "" where none does."""
        for text in texts:
            if self.text.startswith(text, self.at):
                self.at += len(text)
                return text
        return ""

    def peek(self, size: int = 1) -> str:
        return self.text[self.at : self.at + size]

    def need(self, text: str) -> None:
        if not self.has(text):
            raise _UnknownError(text)

    def number(self) -> int:
        start = self.at
        while self.peek().isdecimal() and self.at - start < 9:
            self.at += 1
        if start == self.at:
            raise _UnknownError("number")
        return int(self.text[start : self.at])

    def sequence(self) -> int:
        """The number of a substitute or an argument, up to its `_`: `_` is 0, `0_` is 1, `Z_` is 36."""
        end = self.text.find("_", self.at)
        digits, self.at = self.text[self.at : end], end + 1
        if end < 0 or len(digits) > 5 or not (not digits or digits.isalnum()):
            raise _UnknownError("sequence")
        return int(digits, 36) + 1 if digits else 0

    def short(self, text: str) -> str:
        if len(text) > _LENGTH_MAX:
            raise _UnknownError("length")
        return text

    # Names ----------------------------------------------------------------------------------------------

    def encoding(self, *, shows_result: bool = False) -> str:
        """A function with its parameters, or a variable. Names of templates have the type of the result."""
        name = self.name(is_function=True)
        has_result, after = self.is_template and not self.has_no_result, self.after
        if self.peek() in ("", "E", "."):
            return name
        left, right = self.type() if has_result else ("", "")
        shown = f"{name}({self.parameters()}){after}"
        return self.short(f"{left}{' ' * bool(left)}{shown}{right}" if shows_result else shown)

    def parameters(self) -> str:
        found = []
        while self.peek() not in ("", "E", "."):
            found.append(_text(self.type()))
        return "" if found == ["void"] else ", ".join(one for one in found if one)

    def name(self, *, is_function: bool = False) -> str:
        """A name. Of a function, what its parameters depend on is noted."""
        self.is_template = self.has_no_result = False
        self.after = ""
        if self.has("N"):
            return self.nested(is_function)
        if self.has("Z"):
            return self.local(is_function)
        if self.peek() == "S" and self.peek(2) != "St":
            name = _text(self.substitute())
        else:
            name = "std::" + self.unqualified("") if self.has("St") else self.unqualified("")
            if self.peek() == "I":
                self.substitutes.append((name, ""))
        if self.peek() == "I":
            name += self.template(is_function)
            self.is_template = True
        return self.short(name)

    def nested(self, is_function: bool) -> str:
        after = ""
        while qualifier := self.has("r", "V", "K", "R", "O"):
            after = {"r": "", "V": " volatile", "K": " const", "R": " &", "O": " &&"}[qualifier] + after
        name, is_template, has_no_result = "", False, False
        while not self.has("E"):
            if self.peek() == "I":
                name, is_template = name + self.template(is_function), True
            elif self.peek() == "S":
                name = _text(self.substitute())
                continue
            elif self.peek() == "T":
                name = _text(self.argument())
            else:
                has_no_result = self.peek(2) in ("C1", "C2", "C3", "D0", "D1", "D2", "cv")
                part = self.unqualified(name)
                name, is_template = f"{name}::{part}" if name else part, False
            self.substitutes.append((self.short(name), ""))
        if not name or not self.substitutes:
            raise _UnknownError("empty name")
        self.substitutes.pop()
        self.is_template, self.has_no_result, self.after = is_template, has_no_result, after
        return name

    def local(self, is_function: bool) -> str:
        arguments = self.arguments
        around = self.encoding()
        self.need("E")
        if not is_function:
            self.arguments = arguments
        if self.has("s"):
            name = "string literal"
        else:
            if self.has("d"):
                raise _UnknownError("default argument")
            name = self.name(is_function=is_function)
        if self.has("__"):
            self.number()
            self.need("_")
        elif self.peek() == "_" and self.peek(2)[1:].isdecimal():
            self.at += 2
        return self.short(f"{around}::{name}")

    def unqualified(self, before: str) -> str:
        """A part of a name; `before` is what it is in."""
        if self.peek().isdecimal() or self.has("L"):
            size = self.number()
            part = self.text[self.at : self.at + size]
            self.at += size
            if len(part) < size:
                raise _UnknownError("name")
            name = "(anonymous namespace)" if part.startswith("_GLOBAL__N") else part
        elif self.has("Ul"):
            was_in, self.in_lambda = self.in_lambda, True
            parameters = self.parameters()
            self.in_lambda = was_in
            self.need("E")
            name = f"{{lambda({parameters})#{self.sequence_of_unnamed()}}}"
        elif self.has("Ut"):
            name = f"{{unnamed type#{self.sequence_of_unnamed()}}}"
        elif kind := self.has("C1", "C2", "C3", "D0", "D1", "D2"):
            last = _without_arguments(before).rpartition("::")[2]
            name = "~" * (kind[0] == "D") + last
        elif self.has("cv"):
            name = f"operator {_text(self.type())}"
        elif (operator := self.peek(2)) in _OPERATORS:
            self.at += 2
            name = f"operator{_OPERATORS[operator]}"
        else:
            raise _UnknownError("name")
        while self.has("B"):
            name += f"[abi:{self.unqualified('')}]"
        return name

    def sequence_of_unnamed(self) -> int:
        if self.has("_"):
            return 1
        number = self.number() + 2
        self.need("_")
        return number

    def substitute(self) -> _Type:
        if (standard := self.peek(2)) in _STANDARD:
            self.at += 2
            return _STANDARD[standard], ""
        self.need("S")
        at = self.sequence()
        if at >= len(self.substitutes):
            raise _UnknownError("reference")
        return self.substitutes[at]

    def argument(self) -> _Type:
        self.need("T")
        at = self.sequence()
        if self.in_lambda:
            return f"auto:{at + 1}", ""
        if at >= len(self.arguments):
            raise _UnknownError("reference")
        return self.arguments[at], ""

    def template(self, is_function: bool) -> str:
        """Template arguments, with their brackets."""
        self.need("I")
        if is_function:
            self.arguments = []
        found: list[str] = []
        while not self.has("E"):
            value = self.value()
            found += value
            if is_function:
                self.arguments.append(", ".join(value))
        listed = ", ".join(one for one in found if one)
        return self.short(f"<{listed}{' ' * (bool(found) and found[-1].endswith('>'))}>")

    def value(self) -> list[str]:
        """A template argument, or those of a pack."""
        if self.has("J"):
            pack = []
            while not self.has("E"):
                pack += self.value()
            return pack
        if self.has("Tn"):  # the type that the template declares for the argument
            self.type()
        if self.has("XadL_Z"):
            arguments = self.arguments
            function = self.encoding()
            self.arguments = arguments
            self.need("EE")
            return [f"&{function}"]
        return [self.literal() if self.peek() == "L" else _text(self.type())]

    def literal(self) -> str:
        self.need("L")
        if self.has("_Z"):
            name = self.name()  # of a variable: functions have parameters
            self.need("E")
            return name
        of = _text(self.type())
        minus, start = "-" * bool(self.has("n")), self.at
        end = self.text.find("E", start)
        digits, self.at = self.text[start:end], end + 1
        if end < 0 or not digits.isdecimal():
            raise _UnknownError("literal")
        if of == "bool" and digits in ("0", "1"):
            return ("false", "true")[int(digits)]
        return f"{minus}{digits}{_SUFFIXES[of]}" if of in _SUFFIXES else f"({of}){minus}{digits}"

    # Types ----------------------------------------------------------------------------------------------

    def type(self) -> _Type:
        """A type, to which later parts may refer unless it is a plain one."""
        self.depth += 1
        if self.depth > _DEPTH_MAX:
            raise _UnknownError("depth")
        for size in (1, 2, 5):
            if (plain := self.peek(size)) in _TYPES:
                self.at += size
                self.depth -= 1
                return _TYPES[plain], ""
        found, is_new = self.compound()
        if is_new:
            self.substitutes.append(found)
        self.depth -= 1
        self.short(_text(found))
        return found

    def compound(self) -> tuple[_Type, bool]:
        """A type that is no plain one, and whether it is new."""
        letter = self.peek()
        if letter in ("r", "V", "K"):
            after = ""
            while qualifier := self.has("r", "V", "K"):
                after = {"r": " __restrict", "V": " volatile", "K": " const"}[qualifier] + after
            left, right = self.type()
            return ((left, right + after) if right.startswith("(") else (left + after, right)), True
        if mark := {"P": "*", "R": "&", "O": "&&"}.get(letter):
            self.at += 1
            return _pointer(self.type(), mark), True
        if self.has("F"):
            self.has("Y")
            left, right = self.type()
            parameters = self.parameters()
            self.need("E")
            return (f"{left} ", f"({parameters}){right}"), True
        if self.has("A"):
            size = self.number()
            self.need("_")
            left, right = self.type()
            return (left, f" [{size}]{right.lstrip()}"), True
        if self.has("Dp"):
            return self.type(), True
        if letter == "T":
            found = self.argument()
            if self.peek() == "I":
                self.substitutes.append(found)
                found = _text(found) + self.template(False), ""
            return found, True
        if letter == "S" and self.peek(2) != "St":
            found = self.substitute()
            if self.peek() != "I":
                return found, False
            return (_text(found) + self.template(False), ""), True
        if self.has("u"):
            return (self.unqualified(""), ""), True
        if letter in ("N", "Z", "S") or letter.isdecimal():
            state = self.is_template, self.has_no_result, self.after
            found = self.name(), ""
            self.is_template, self.has_no_result, self.after = state
            return found, True
        raise _UnknownError("type")


def _pointer(of: _Type, mark: str) -> _Type:
    left, right = of
    if right.startswith((" [", "(")):
        return f"{left}{' ' * (not left.endswith(' '))}({mark}", f"){right}"
    if mark != "*" and left.endswith("&") and not right:
        return (left if mark == "&&" else left.rstrip("&") + "&"), right
    return left + mark, right


def _text(of: _Type) -> str:
    left, right = of
    return left + right


def _without_arguments(name: str) -> str:
    """A name without its last template arguments."""
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] == ">") - (name[at] == "<")
        if depth == 0:
            return name[:at] if name[at] == "<" else name
    return name


@remembered
def demangled(name: str) -> str:
    """The name of a C++ function without its parameters, and without the ending of AMD's kernels; other names
    stay as they are.
    """
    return _demangled(name, lambda mangled: mangled.name(is_function=True))


def demangled_signature(name: str) -> str:
    """The same with the parameters, and the type of the result where the mangled name has it."""
    return _demangled(name, lambda mangled: mangled.encoding(shows_result=True))


def _demangled(name: str, read: Callable[[_Mangled], str]) -> str:
    if not name.startswith("_Z") or len(name) > _LENGTH_MAX:
        return name
    try:
        return read(_Mangled(name[2:].removesuffix(".kd")))
    except (_UnknownError, ValueError, RecursionError):
        return name
