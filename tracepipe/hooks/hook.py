"""Hooks: what to probe and what to record, as shipped sets, the command line and TOML files define it.

A hook names functions by pattern. Resolved with a library, the kernel's symbols or tracefs, it becomes
probes, one for each function, which every engine can attach.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Kinds of recorded values: name → (bits, signed). `ptr` is an address, `ioctl` a command number that is
# decoded, `str` the text at an address (at most TEXT_BYTES), `dim3` CUDA's three sizes, which take two
# positions, `hash128` the hash of a structure of 128 bytes that is passed by value, `hash128*` of one that is
# pointed to; any other name is a table of names for an i32, such as CUresult.
INTEGER_KINDS: dict[str, tuple[int, bool]] = {
    "bool": (8, False),
    "u8": (8, False),
    "u16": (16, False),
    "u32": (32, False),
    "u64": (64, False),
    "i8": (8, True),
    "i16": (16, True),
    "i32": (32, True),
    "i64": (64, True),
    "ptr": (64, False),
    "ioctl": (32, False),
}
HASH_KINDS = ("hash128", "hash128*")
"""A structure that is passed by value or by pointer is recorded as a hash of 64 bits."""
HASHED_WORDS = 16
"""The words of such a structure."""
WHOLE_KINDS = ("str", "dim3", *HASH_KINDS)
"""Kinds of arguments only, not of results or of what a pointer points to."""
TEXT_BYTES = 248
"""The longest recorded text: eight records of 31 bytes."""
TEXT_FORMS = ("array", "__data_loc", "__rel_loc")
"""A tracepoint's text is in the field, or at the field's offset from the record's start or its own end."""

PROBED_LAYERS = ("userspace", "syscall", "kernel", "scheduler")
"""The layers of probes that can be requested by name, outermost first."""
OWN_LAYER = "hook"
"""The layer of hooks with a separate, named layer."""
HOST_SAMPLE = "host_sample"
"""The layer of the stacks of threads: samples of those that run, and where they left their processors."""
RECORDED_LAYERS = (*PROBED_LAYERS, OWN_LAYER)
"""All layers of probes."""
OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "&")
EFFECTS = ("", "alloc", "free", "alloc_host", "free_host", "set", "transfer", "name", "communicator")
NAMING_EFFECTS = ("name", "communicator")
"""Effects without an event: what they say of a handle is an argument of later calls."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A recorded argument of a function, or field of a tracepoint.

    `position` counts from 0 in machine words: a dim3 before it counts two. For a tracepoint it is the offset
    of the field in its record, bytes. `out`: not the pointer but what it points to when the function returns.
    Names `grid.x`, `grid.y`, `grid.z` are written as one array `grid`. `text_form` and `size_bytes` of a
    tracepoint's text: one of `TEXT_FORMS`, and how much room an array has.
    """

    name: str
    position: int
    kind: str = "u64"
    out: bool = False
    text_form: str = ""
    size_bytes: int = 0

    @property
    def bits(self) -> int:
        """Width of the value."""
        return INTEGER_KINDS.get(self.kind, (64 if self.kind in WHOLE_KINDS else 32, True))[0]

    @property
    def is_hashed(self) -> bool:
        """Whether the hash of a structure is recorded."""
        return self.kind in HASH_KINDS


@dataclass(frozen=True, slots=True)
class Condition:
    """Record the call only if `argument` compares so with `value`; `&` tests for a common bit."""

    argument: Argument
    operator: str
    value: int


@dataclass(frozen=True, slots=True)
class Signature:
    """The recorded parts of a call: arguments in order, and the kind of the result, "" for none."""

    arguments: tuple[Argument, ...] = ()
    result: str = ""


@dataclass(frozen=True, slots=True)
class Hook:
    """A pattern of functions or tracepoints, and what is recorded of each.

    `target` is `uprobe`, `kprobe` or `tracepoint`; `library` a uprobe's library or program, as a soname or a
    path ("" for the program itself); `pattern` a shell pattern of function names, or of `group:name`.
    `layer` is one of `PROBED_LAYERS`, or `OWN_LAYER` with the name `layer_name`, "" for that of the file.
    `name` replaces the function's in the events. `returns`: the call is recorded from entry to return, else
    its entry as an instant. `effect` is what a successful call does: `alloc`, `free`, `alloc_host`,
    `free_host`, `set` become `memory` events, from its arguments `address` and `size_bytes`; `transfer` a
    `transfer` event, from `size_bytes` and `direction` (the hook's, or the argument's); `name`: it gives its
    argument `handle` the name in its argument `symbol`, or that which `function` has, shown wherever that
    value is an argument `function`; `communicator`: it makes the communicator in its argument `comm`, from an
    `id` or a `parent`, whose group is shown wherever that value is an argument `comm`.
    `modules` of a kprobe: the kernel modules to look in, all if empty.
    `everywhere`: not of the target's threads only (an interrupt). `origin` says where it was written; hooks
    of one origin are alternatives. `group`: the hooks that stand together in a file: one must be there.
    """

    target: str
    library: str
    pattern: str
    layer: str
    signature: Signature = Signature()
    name: str = ""
    condition: Condition | None = None
    returns: bool = True
    effect: str = ""
    direction: str = ""
    modules: tuple[str, ...] = ()
    everywhere: bool = False
    origin: str = ""
    group: str = ""
    layer_name: str = ""


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The first instruction of a function in a file; `offset` in bytes from its start."""

    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class KernelPlace:
    """A function of the kernel or of a module; `address` is 0 if the kernel hides addresses."""

    symbol: str
    module: str
    address: int


@dataclass(frozen=True, slots=True)
class TracepointPlace:
    """A tracepoint, `group/name` as in tracefs."""

    point: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A place to attach to. `symbol` is the name of the function or tracepoint, `name` that of its events."""

    symbol: str
    name: str
    place: FilePlace | KernelPlace | TracepointPlace
    hook: Hook

    @property
    def is_span(self) -> bool:
        """Whether a call is recorded from its entry to its return, and not as an instant."""
        return self.hook.returns and not isinstance(self.place, TracepointPlace)

    @property
    def layer(self) -> str:
        """The layer of its events."""
        return self.hook.layer

    @property
    def signature(self) -> Signature:
        """The signature of the recorded function."""
        return self.hook.signature


@dataclass(frozen=True, slots=True)
class Selection:
    """The probes found for hooks; messages on why other hooks found none, and which were skipped."""

    probes: list[Probe] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
