"""The bpftrace script's blocks for functions: what they record at the entry and at the return of a call."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.hooks.hook import HASHED_WORDS, FilePlace, KernelPlace, Probe
from tracepipe.hooks.slots import slots
from tracepipe.tracer.bpf.specs import QUEUES_ITEMS, WHOLE_EFFECTS, hashed_slot, is_paired
from tracepipe.tracer.engines.bpftrace.language import (
    TEXT_PIECE_BYTES,
    THREADS,
    Language,
    LineKind,
    comparison,
    quoted,
)
from tracepipe.tracer.records.record import DROP_LAYERS


class FunctionProbe:
    """The blocks of a function's entry and return."""

    def __init__(self, language: Language, index: int, probe: Probe) -> None:
        self.language, self.index, self.probe = language, index, probe
        self.layer = DROP_LAYERS.index(probe.layer)
        self.in_kernel = isinstance(probe.place, KernelPlace)
        arguments = probe.signature.arguments
        self.out = next((a for a in arguments if a.out), None)
        self.string = next((a for a in arguments if a.kind == "str"), None)
        self.paired = is_paired(probe, language.filters)
        self.is_whole = probe.hook.effect in WHOLE_EFFECTS
        self.waits = language.defers and self.paired and not self.is_whole
        architecture = language.architecture
        # The key of a call is its thread and stack pointer; in the kernel its thread and function.
        frame = f'(uint64)reg("sp") + {architecture.frame_bytes}'
        self.frame = (
            (f"(uint64){index}", f"(uint64){index}") if self.in_kernel else (frame, '(uint64)reg("sp")')
        )

    def blocks(self) -> Iterator[tuple[str, list[str]]]:
        """The attach point and the statements of each block."""
        place = self.probe.place
        if isinstance(place, FilePlace):
            target = f'probe:"{quoted(place.path)}":"{quoted(self.probe.symbol)}"'
            tracked = " /@t[(uint64)tid] != 0/"
            yield f"u{target}{tracked}", [self._enter()]
            if self.probe.hook.returns:
                yield f"uret{target}{tracked}", [self._leave()]
            return
        target = f'probe:"{quoted(self.probe.symbol)}"'
        yield f"k{target}", self._driver_entry()
        if self.probe.hook.returns:
            yield f"kret{target}", self._driver_return()

    def _enter(self) -> str:
        language = self.language
        events = 2 if self.probe.hook.returns else 1
        words = [self._slot(slot.low, slot.high) for slot in slots(self.probe.signature)]
        text = self._word(self.string.position) if self.string else "(uint64)0"
        hashed, on_stack = hashed_slot(self.probe)
        digest = self._digest(on_stack - 1, words[hashed - 1]) if hashed else ""
        if hashed:
            words[hashed - 1] = "$h"
        kept = ""
        if self.paired:
            parts = ["(uint64)nsecs", self._word(self.out.position) if self.out else "(uint64)0"]
            if language.defers:
                # All values of a map have the same type.
                parts += [text, *words, *["(uint64)0"] * (language.widest - len(words))]
            kept = f"@o[{self.frame[0]}, (uint64)tid] = ({', '.join(parts)});"
        printed = "" if self.waits else self._printed_entry(words, text, "(uint64)nsecs")
        statement = f"{digest}{kept} {printed}"
        refused = language.filtered(self.layer, events)
        if not self.is_whole:
            statement = language.sampled(self.index, statement, refused)
        condition = self.probe.hook.condition
        if condition is not None:
            test = comparison(condition, self._word(condition.argument.position))
            statement = f"if ({test}) {{ {statement} }}"  # other calls are not counted
        return statement

    def _leave(self) -> str:
        language = self.language
        back: list[tuple[str, str]] = [("%x", "pid")]
        if self.in_kernel:
            back.append(("%lx", "$v"))
        back.append(("%lx", "retval"))
        if self.out is not None:
            bytes_ = self.out.bits
            space = "kptr" if self.in_kernel else "uptr"
            back.append(("%lx", f"$out == 0 ? (uint64)0 : (uint64)*(uint{bytes_}*){space}($out)"))
        printed = language.line(f"{LineKind.RETURN}{self.index:x}", self.layer, *back)
        if not self.paired:
            return printed
        key = f"@o[{self.frame[1]}, (uint64)tid]"
        if self.waits:
            words = [f"$o.{3 + n}" for n in range(len(slots(self.probe.signature)))]
            first = self._printed_entry(words, "$o.2", "$o.0")
            printed = (
                f"if ((uint64)nsecs - $o.0 < {language.filters.min_duration_ns}) "
                f"{{ {language.filtered(self.layer, 2)} }} else {{ {first} {printed} }}"
            )
        # Its entry may have been filtered, which counted the return too.
        return f"$o = {key}; $out = $o.1; delete({key}); if ($o.0 != 0) {{ {printed} }}"

    def _printed_entry(self, words: list[str], text: str, began: str) -> str:
        """The statements that print an entry: its text in two pieces, then the line."""
        language = self.language
        statements = []
        if self.string is not None:
            space = "kptr" if self.in_kernel else "uptr"
            for piece in range(2):
                pointer = f"{space}({text} + {piece * TEXT_PIECE_BYTES})"
                statements.append(language.text_line(self.index, self.layer, piece, f"str({pointer})"))
        fields = [("%x", "pid")]
        if language.defers:
            fields.append(("%lx", began))
        if self.in_kernel:
            fields.append(("%lx", "$v"))
        fields += [("%lx", word) for word in words]
        statements.append(language.line(f"{LineKind.ENTER}{self.index:x}", self.layer, *fields))
        return " ".join(statements)

    def _driver_entry(self) -> list[str]:
        """Find the thread for which a worker of the driver runs this, from the queue's items, as in
        probes.bpf.c.

        @q: function, argument → the thread that queued it. By worker: @u the served thread, @ui the function
        that began to serve it, @ud how deeply that function is nested.
        """
        assert isinstance(self.probe.place, KernelPlace)
        architecture, index = self.language.architecture, self.index + 1
        address = f"(uint64){self.probe.place.address:#x}"
        if not self.probe.place.address:
            address = f'(uint64)reg("{architecture.instruction}") - {architecture.breakpoint_bytes}'
        name = self.language.line(LineKind.THREAD_NAME, THREADS, ("%x", "tid"), ("%x", "tid"), text="comm")
        queues = ""
        if self.probe.symbol == QUEUES_ITEMS:
            # struct nv_kthread_q_item: the function is at 16, its argument at 24.
            queues = (
                "@q[*(uint64*)kptr((uint64)arg1 + 16), *(uint64*)kptr((uint64)arg1 + 24)] = "
                "$v != 0 ? $v : ((uint64)pid << 32 | (uint64)tid);"
            )
        return [
            "$t = @t[(uint64)tid]; $v = (uint64)0;",
            "if ($t == 0 && tid != 0) {",
            "  $v = @u[(uint64)tid];",
            f"  if ($v != 0) {{ if (@ui[(uint64)tid] == (uint64){index}) {{ @ud[(uint64)tid] += 1; }} }}",
            f"  else {{ $q = @q[{address}, (uint64)arg0]; if ($q != 0 && @on != 0) {{",
            f"    delete(@q[{address}, (uint64)arg0]); $v = $q; @u[(uint64)tid] = $q;",
            f"    @ui[(uint64)tid] = (uint64){index}; @ud[(uint64)tid] = 1; {name} }} }}",
            "}",
            f"if ($t != 0 || $v != 0) {{ {queues} {self._enter()} }}",
        ]

    def _driver_return(self) -> list[str]:
        index = self.index + 1
        return [
            "$t = @t[(uint64)tid]; $v = (uint64)0;",
            "if ($t == 0 && tid != 0) { $v = @u[(uint64)tid];",
            f"  if ($v != 0 && @ui[(uint64)tid] == (uint64){index}) {{",
            "    @ud[(uint64)tid] += -1; if (@ud[(uint64)tid] == 0) { delete(@u[(uint64)tid]); } } }",
            f"if ($t != 0 || $v != 0) {{ {self._leave()} }}",
        ]

    def _digest(self, on_stack: int, pointer: str) -> str:
        """The statements that hash a structure into $h, as hash_of of probes.bpf.c does."""
        at = pointer if on_stack < 0 else f'(uint64)reg("sp") + {self._above(on_stack)}'
        steps = "".join(
            f"$h = ($h ^ *(uint64*)uptr($at + {8 * n})) * (uint64)0x100000001b3; $h = $h ^ ($h >> 32); "
            for n in range(HASHED_WORDS)
        )
        # A constant of bpftrace has 63 bits.
        return f"$at = {at}; $h = ((uint64)0xcbf29ce4 << 32) | (uint64)0x84222325; {steps}"

    def _slot(self, low: int, high: int | None) -> str:
        if high is None:
            return self._word(low)
        return f"(({self._word(low)} & 0xffffffff) | ({self._word(high)} << 32))"

    def _word(self, position: int) -> str:
        architecture = self.language.architecture
        if position < architecture.registers:
            return f"(uint64)arg{position}"
        space = "kptr" if self.in_kernel else "uptr"
        return f'*(uint64*){space}((uint64)reg("sp") + {self._above(position)})'

    def _above(self, position: int) -> int:
        """How far a word on the stack is above the stack pointer, in bytes."""
        architecture = self.language.architecture
        return architecture.stack_bytes + 8 * (position - architecture.registers)
