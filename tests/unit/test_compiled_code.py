"""The lines of a model behind generated code, from logs as PyTorch 2.11 writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gpu_records import pack_record
from tracepipe.event.stacks import Frame
from tracepipe.tracer.gpu.engines import compiled_code
from tracepipe.tracer.gpu.engines.channel import NAME, Kind
from tracepipe.tracer.gpu.engines.compiled_code import VARIABLE, CompiledCode, CompiledStream
from tracepipe.tracer.gpu.engines.kernels import CALL, KernelDecoder, KernelKind
from tracepipe.tracer.gpu.engines.streams import FRAME, STACK, GpuEngine, GpuRenderer, ProcessDecoder

CODE = "/tmp/torchinductor_ann/ab/c" + "a2" * 25 + "z.py"
GRAPH = """class GraphModule(torch.nn.Module):
    def forward(self, L_x_: "f32[32]"):
        l_x_ = L_x_

        # File: /home/ann/net.py:17 in forward, code: h = self.up(x)
        h: "f32[32, 64][64, 1]cuda:0" = torch._C._nn.linear(l_x_, w);  l_x_ = None

        # File: /home/ann/net.py:18 in forward, code: return x + gelu(h)
        gelu: "f32[32, 64]" = torch._C._nn.gelu(h);  h = None
        add = l_x_ + gelu
        # No stacktrace found for following nodes
        made: "f32[32]" = torch.zeros(32)
        return (add,)
"""
BACKWARD = """class GraphModule(torch.nn.Module):
        # File: /home/ann/net.py:17 in forward, code: h = self.up(x)
        mm_3: "f32[32]" = torch.ops.aten.mm.default(a, b)
        gelu: "f32[32]" = torch.ops.aten.clone(a)
        # File: /home/ann/net.py:99 in forward, code: a line of another version of the file
        mm_4: "f32[32]" = torch.ops.aten.mm.default(a, b)
"""
FORWARD_CODE = """# AOT ID: ['0_forward']
# Topologically Sorted Source Nodes: [h], Original ATen: [aten.addmm]
def call(args):
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((32, 64), (64, 1), torch.float32)
        # Topologically Sorted Source Nodes: [h], Original ATen: [aten.t, aten.addmm]
        extern_kernels.addmm(primals_2, buf0, out=buf1)
        del primals_2
        buf2 = empty_strided_cuda((32, 64), (64, 1), torch.float32)
        unnamed_kernel.run(buf2)
        # Topologically Sorted Source Nodes: [h, gelu, add], Original ATen: [aten.gelu, aten.add]
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_gelu_0.run(buf1, buf2, 2048, stream=stream0)
        # Topologically Sorted Source Nodes: [made, unheard], Original ATen: [aten.zeros]
        triton_poi_fused_zeros_1.run(buf3)
"""
BACKWARD_CODE = """# AOT ID: ['0_backward']
def call(args):
        # Unsorted Source Nodes: [add, mm_3], Original ATen: [aten.add, aten.sum]
        triton_poi_fused_add_sum_0.run(buf0, buf1, 2048)
        # Topologically Sorted Source Nodes: [gelu, mm_4], Original ATen: [aten.mm]
        extern_kernels.mm(buf0, buf1, out=buf2)
"""
UP, GELU = ("forward", "/home/ann/net.py", 17), ("forward", "/home/ann/net.py", 18)


def logged(kind: str, content: str, compile_id: int = 0, **about: str) -> str:
    """A record of the log."""
    head = {kind: about, "frame_id": 0, "frame_compile_id": compile_id, "attempt": 0, "has_payload": "ab12"}
    where = "V1128 13:29:25.142000 8604 torch/_inductor/graph.py:2745]"
    return f"{where} {json.dumps(head)}\n" + "".join(f"\t{line}\n" for line in content.split("\n"))


def written(folder: Path, *records: str, name: str = "dedicated_log_torch_trace_ab12.log") -> CompiledCode:
    (folder / name).write_text("".join(records))
    return CompiledCode(folder)


def line_of(code: str, text: str, nth: int = 0) -> int:
    return [number for number, line in enumerate(code.split("\n"), 1) if text in line][nth]


def behind(code: CompiledCode, line: int) -> list[tuple[str, str, int]]:
    return code.behind([("run", "/usr/lib/python3/dist-packages/torch/x.py", 3), ("call", CODE, line)])


def test_a_kernel_has_the_lines_of_its_nodes_the_last_first(tmp_path: Path) -> None:
    noise = logged("chromium_event", "{}"), "junk\n", "\n\ta line that belongs to nothing\n"
    code = written(
        tmp_path,
        *noise,
        logged("dynamo_output_graph", GRAPH),
        logged("aot_backward_graph", BACKWARD),
        logged("inductor_output_code", FORWARD_CODE, filename=CODE),
    )
    assert behind(code, line_of(FORWARD_CODE, "addmm(")) == [UP]
    assert behind(code, line_of(FORWARD_CODE, "add_gelu_0.run")) == [GELU, UP]
    assert behind(code, line_of(FORWARD_CODE, "unnamed_kernel")) == [], "no comment is its own"
    assert behind(code, line_of(FORWARD_CODE, "zeros_1")) == [], "its nodes have no lines"
    assert behind(code, 1) == []
    assert code.behind([("call", CODE.replace("a2", "b3"), 7)]) == []
    assert code.behind([("main", "/home/ann/train.py", 7)]) == []


def test_code_of_the_backward_pass_has_nodes_of_both_graphs(tmp_path: Path) -> None:
    """Those that mean two lines, or one that only a cache knows, are left out."""
    code = written(
        tmp_path,
        logged("dynamo_output_graph", GRAPH),
        logged("aot_backward_graph", BACKWARD),
        logged("inductor_output_code", BACKWARD_CODE, filename=CODE),
    )
    first, second = line_of(BACKWARD_CODE, "sum_0.run"), line_of(BACKWARD_CODE, "extern_kernels")
    marked = [("forward, backward", file, line) for _, file, line in (UP, GELU)]
    assert behind(code, first) == marked
    assert behind(code, second) == []


def test_a_kernel_of_a_library_has_the_line_of_its_last_node(tmp_path: Path) -> None:
    """The nodes before it are its input, as what Inductor itself logs of its provenance shows."""
    generated = """# AOT ID: ['0_inference']
# Topologically Sorted Source Nodes: [h, gelu, permute_7, ], Original ATen: [aten.view, aten.mm]
extern_kernels.mm(buf0, buf1, out=buf2)
# Topologically Sorted Source Nodes: [h, made], Original ATen: [aten.view, aten.mm]
extern_kernels.mm(buf0, buf1, out=buf2)
"""
    code = written(
        tmp_path,
        logged("dynamo_output_graph", GRAPH),
        logged("inductor_output_code", generated, filename=CODE),
    )
    assert [behind(code, line) for line in (3, 5)] == [[GELU], []]


def test_the_same_code_of_two_functions_has_lines_only_if_they_agree(tmp_path: Path) -> None:
    of_code = [logged("inductor_output_code", FORWARD_CODE, at, filename=CODE) for at in range(3)]
    graphs = [logged("dynamo_output_graph", graph, at) for at, graph in enumerate((GRAPH, GRAPH))]
    code = written(tmp_path, graphs[0], of_code[0], graphs[1], of_code[1])
    at = line_of(FORWARD_CODE, "addmm(")
    assert behind(code, at) == [UP]
    moved = logged("dynamo_output_graph", GRAPH.replace("net.py:17", "net.py:27"), 2)
    code = written(tmp_path, graphs[0], of_code[0], moved, of_code[2])
    assert behind(code, at) == []
    assert behind(code, line_of(FORWARD_CODE, "zeros_1")) == []


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "dedicated_log_torch_trace_rank_1_x_y.log"
    graph = logged("dynamo_output_graph", GRAPH)
    path.write_text(graph + logged("inductor_output_code", FORWARD_CODE, filename=CODE)[:60])
    code = CompiledCode(tmp_path)
    at = line_of(FORWARD_CODE, "addmm(")
    assert behind(code, at) == []
    path.write_text(graph + logged("inductor_output_code", FORWARD_CODE, filename=CODE))
    assert behind(code, at) == [UP]
    path.unlink()
    assert behind(code, at) == [UP]


def test_what_is_no_log_is_not_read(tmp_path: Path) -> None:
    """The traced program may have made anything of the folder."""
    folder, secret = tmp_path / "logs", tmp_path / "secret"
    folder.mkdir()
    secret.write_text(
        logged("dynamo_output_graph", GRAPH) + logged("inductor_output_code", FORWARD_CODE, filename=CODE)
    )
    (folder / "dedicated_log_torch_trace_a.log").symlink_to(secret)
    os.mkfifo(folder / "dedicated_log_torch_trace_b.log")
    (folder / "dedicated_log_torch_trace_c.log").mkdir()
    (folder / "other.log").write_text(secret.read_text())
    assert behind(CompiledCode(folder), line_of(FORWARD_CODE, "addmm(")) == []
    assert behind(CompiledCode(tmp_path / "missing"), 1) == []


def test_little_is_read_of_a_log_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "_KEPT_MAX", 3)
    code = written(tmp_path, logged("dynamo_output_graph", GRAPH))
    assert behind(code, 1) == []
    with (tmp_path / "dedicated_log_torch_trace_ab12.log").open("a") as log:
        log.write(logged("inductor_output_code", FORWARD_CODE, filename=CODE))
    assert behind(code, line_of(FORWARD_CODE, "addmm(")) == []


@given(st.data())
def test_no_log_makes_it_fail(data: st.DataObject) -> None:
    """Lines of a log in any order, some of them with other text in them."""
    whole = "".join(
        [
            logged("dynamo_output_graph", GRAPH),
            logged("aot_backward_graph", BACKWARD),
            logged("inductor_output_code", BACKWARD_CODE, filename=CODE),
        ]
    )
    lines = data.draw(st.lists(st.sampled_from(whole.splitlines(keepends=True)), max_size=40))
    at = data.draw(st.integers(0, max(0, sum(map(len, lines)) - 1)))
    text = "".join(lines)
    junk = data.draw(st.sampled_from(['"', "{", "[]", "\t", "\n", "9" * 40, ": null", "\x00", "\ud800"]))
    log = compiled_code._Log(Path(os.devnull))
    codes: dict[str, list[compiled_code._Code]] = {}
    for line in (text[:at] + junk + text[at:]).split("\n"):
        log.take(f"{line}\n", codes)
    for code in (code for found in codes.values() for code in found):
        for line in range(12):
            assert all(len(frame) == 3 for frame in code.behind(line))


def test_stacks_in_generated_code_lead_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    stream = CompiledStream((os.getuid(), os.getgid()))
    folder = Path(stream.environment()[VARIABLE])
    assert folder.parent == tmp_path
    written(
        folder,
        logged("dynamo_output_graph", GRAPH),
        logged("inductor_output_code", FORWARD_CODE, filename=CODE),
    )
    renderer = GpuRenderer([ProcessDecoder, KernelDecoder, *stream.decoders])
    numbers = [
        ("call", CODE, line_of(FORWARD_CODE, "add_gelu_0.run")),
        ("step", "/home/ann/train.py", 41),
    ]
    chunk = b"".join(
        pack_record(Kind.FRAME, 7, 7, 1, FRAME.pack(number, line, len(name)) + (name + file).encode())
        for number, (name, file, line) in enumerate(numbers, 1)
    )
    chunk += pack_record(Kind.STACK, 7, 7, 1, STACK.pack(55, 0, 2) + NAME.pack(1) + NAME.pack(2))
    call = CALL.pack(10, 11, 55, 1, 307, 7, 1, 0, *[0xFFFFFFFF] * 3)
    for made in (renderer, renderer.anew()):
        lines = made.render(chunk + pack_record(KernelKind.CALL, 7, 7, 2, call)).texts
        frames = json.loads(lines[0])["frames"]
        assert [(one["function"], one["file"], one["line"]) for one in frames] == [GELU, UP, *numbers]
    stream.close()
    assert not folder.exists()


def test_a_folder_of_the_user_is_read_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    engine = GpuEngine([CompiledStream((os.getuid(), os.getgid()))])
    assert VARIABLE not in engine.environment()
    engine.close()
    assert tmp_path.exists()


@pytest.mark.parametrize(
    ("function", "file"),
    [("call", CODE), ("call", CODE[5:]), ("call", "/cache/ab/" + CODE[-55:]), ("launcher", "<string>")],
)
def test_generated_code_is_nobodys_line(function: str, file: str) -> None:
    assert Frame(function, file, 7).is_library
    assert not Frame("<module>", "<string>", 7).is_library, "python -c"
