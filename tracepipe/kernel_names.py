"""Names of kernels: the one that tells kernels apart, and the one that people read."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Final, TypeVar

# Brackets in an operator's own name open and close nothing.
_OPERATOR: Final = re.compile(r"\boperator ?(\(\)|\[\]|->\*?|<=>|<<=?|>>=?|<=?|>=?)( (?=<))?")
# The name of such an operator, as of a conversion, has blanks up to its parameters.
_NAMED_OPERATOR: Final = re.compile(r'\boperator(?:"")? ')
_PARTNERS: Final = {">": "<", ")": "(", "]": "[", "}": "{"}
_BRACKET_OR_BLANK: Final = re.compile(r"[<>()\[\]{} ]")
# Namespaces and classes before a name.
_QUALIFIER: Final = re.compile(r"(?<![\w)}>:])(?:(?:\w+|\(anonymous namespace\)|<unnamed>)::)+(?=[\w~])")
# Names that are remembered: to shorten one takes some 100 µs, and a kernel has many shapes.
_REMEMBERED: Final = 1 << 10
_REMEMBERED_LENGTH_MAX: Final = 1 << 11
Text = TypeVar("Text", str, bytes)
Result = TypeVar("Result")


def remembered(of_name: Callable[[Text], Result]) -> Callable[[Text], Result]:
    """A function that remembers its results for names that are not long: it may be asked for any text."""
    known = lru_cache(_REMEMBERED)(of_name)

    @wraps(of_name)
    def result(name: Text) -> Result:
        return known(name) if len(name) <= _REMEMBERED_LENGTH_MAX else of_name(name)

    return result


@remembered
def kernel_title(name: str) -> str:
    """A name as tracks and tables show it: without return type, parameters and namespaces.

    `void at::native::(anonymous namespace)::f<c10::Half>(int)` is `f<Half>`. Kernels of different namespaces
    may have one title: `short_kernel_name` tells them apart.
    """
    return without_namespaces(short_kernel_name(name))


# Kernels that apply a function to tensors: PyTorch's, whose function is a template argument.
_APPLIES: Final = re.compile(r"(\w*elementwise_kernel\w*|reduce_kernel|multi_tensor_apply_kernel)<")
# Template arguments that say nothing of it, and those around its name, with the place of the name.
_NO_FUNCTION: Final = re.compile(r"\d|true$|false$|-|\w*TensorListMetadata")
_AROUND: Final = {
    **dict.fromkeys(("gpu_kernel_impl", "gpu_kernel_impl_nocast"), 0),
    **dict.fromkeys(("ReduceOp", "func_wrapper_t"), 1),
    **dict.fromkeys(("BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor"), 3),
}
_LAMBDA: Final = re.compile(r"\{lambda\(([^(),]+)[^{}]*\)#\d+\}$")


@remembered
def applied_function(title: str) -> str:
    """The title of a kernel that applies a function to tensors, with the function first:
    `elementwise_kernel<128, 4, gpu_kernel_impl<CUDAFunctor_add<float>>(…)::{lambda(int)#1}>` is
    `CUDAFunctor_add<float> (elementwise)`. Other titles stay as they are, and so does one of an unknown form.
    """
    if (found := _APPLIES.match(title)) is None:
        return title
    own = found[1].replace("_kernel", "")
    functions = (one for one in template_arguments(title) if not _NO_FUNCTION.match(one))
    function, of = next(functions, ""), ""
    while (around := function.partition("<")[0]) in _AROUND:
        inner = template_arguments(function)
        if len(inner) <= _AROUND[around]:
            return title
        if _AROUND[around] == 3:  # of an operator with two operands, one of which may be a constant
            of = inner[0] if around == "BinaryFunctor" else f"{inner[0]}, scalar"
        function = inner[_AROUND[around]]
    typed = _LAMBDA.search(function)
    plain = _OPERATOR.sub(lambda one: "_" * len(one[0]), function)
    name = function[:at] if (at := _closed_until(plain, "(")) else function
    if of or (typed and "<" not in name):
        name = f"{name.partition('<')[0]}<{of or (typed[1] if typed else '')}>"
    return f"{name} ({own})" if name and "lambda" not in name else title


def template_arguments(title: str) -> list[str]:
    """The template arguments of the first name in a title that has any."""
    text = title.partition("<")[2]
    plain, found = _OPERATOR.sub(lambda one: "_" * len(one[0]), text), list[str]()
    while at := _closed_until(plain, ",>"):
        found.append(text[:at].strip())
        if plain[at] == ">":
            return found
        text, plain = text[at + 1 :], plain[at + 1 :]
    return []


def _closed_until(text: str, letters: str) -> int:
    """The first place of one of some letters that is in no bracket; 0 without one."""
    depth = 0
    for at, letter in enumerate(text):
        if depth == 0 and letter in letters:
            return at
        depth += (letter in "<([{") - (letter in ">)]}")
    return 0


def without_namespaces(name: str) -> str:
    """A short name as people read it."""
    return _QUALIFIER.sub("", name).replace("> >", ">>")


@remembered
def short_kernel_name(name: str) -> str:
    """A demangled name without its return type and parameters: `void f<int>(int*)` is `f<int>`.

    It is what all engines and formats agree on: some give a name with its parameters, others without.

    Names that are not C++ functions stay as they are.
    """
    text = name.partition(" [clone ")[0].removesuffix(" const")
    plain = _OPERATOR.sub(lambda found: "_" * len(found[0]), text)
    opened, blanks = _brackets(plain)
    if opened <= 0:
        return name
    # Only templates have their return type in the name; it ends at the last blank outside of brackets,
    # unless that is in "f() const::{lambda()#1}".
    ends = {found.end() - 1 for found in _NAMED_OPERATOR.finditer(plain)}
    blanks = blanks[: next((at for at, blank in enumerate(blanks) if blank in ends), None)]
    begins = [at + 1 for at in blanks if at < opened and not plain.startswith("const::", at + 1)]
    return text[begins[-1] if begins else 0 : opened] or name


def _brackets(text: str) -> tuple[int, list[int]]:
    """The place of the bracket that the last letter, a `)`, closes, or -1 without one; and the places of
    blanks outside of brackets.

    Inside parentheses, `<` and `>` may compare, as in `enable_if<((8)>(0)), void>`: one that has no partner
    before the parenthesis ends is no bracket.
    """
    open_at, blanks, closed = list[int](), list[int](), -1
    for found in _BRACKET_OR_BLANK.finditer(text):
        at, letter = found.start(), found[0]
        if letter in _PARTNERS.values():
            open_at.append(at)
        elif letter in _PARTNERS:
            if letter == ">":
                closed = open_at.pop() if open_at and text[open_at[-1]] == "<" else -1
                continue
            while open_at and text[open_at[-1]] == "<":
                open_at.pop()
            closed = open_at.pop() if open_at and text[open_at[-1]] == _PARTNERS[letter] else -1
        elif not open_at:
            blanks.append(at)
    return closed if text.endswith(")") else -1, blanks
