"""What kernels are called: the name that all engines agree on, and the title that people read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import loader, span, write
from tracepipe.kernel_names import applied_function, kernel_title, short_kernel_name
from tracepipe.reports.diff import Options, run
from tracepipe.store.run import load_run


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("vectorAdd(float const*, int)", "vectorAdd"),
        ("void f<int>(int*)", "f<int>"),
        ("void (anonymous namespace)::softmax<float>(float*)", "(anonymous namespace)::softmax<float>"),
        ("void g<(int)3, h(int)>(int)", "g<(int)3, h(int)>"),
        (
            "void at::kernel<2, at::copy(Base&)::{lambda()#3}::operator()() const::{lambda(float)#1}>(int)",
            "at::kernel<2, at::copy(Base&)::{lambda()#3}::operator()() const::{lambda(float)#1}>",
        ),
        ("void f<&A::operator< >(int)", "f<&A::operator< >"),
        ("run(int)::{lambda(int)#1}::operator()(int) const", "run(int)::{lambda(int)#1}::operator()"),
        ("bool a::operator< <int>(a::A<int> const&, int)", "a::operator< <int>"),
        ("O& operator<< <char>(O&, char)", "operator<< <char>"),
        ("a::A::operator unsigned long() const", "a::A::operator unsigned long"),
        ("decltype(auto) A::operator B<int, 3>*<1>()", "A::operator B<int, 3>*<1>"),
        ('operator"" _ns(char)', 'operator"" _ns'),
        ("f(int) [clone .kd]", "f"),
        (
            "std::enable_if<(((8)>(0)))&&a::b<c::D>::exists, void>::type a::k<c::D, 8>(c::D*, long)",
            "a::k<c::D, 8>",
        ),
        ("X<((1)<(2)), int>::type a::k<(3)>(int)", "a::k<(3)>"),
        ("void k<(decltype(a->b))0>(int)", "k<(decltype(a->b))0>"),
        ("a > b(int)", "b"),
        ("nvjet_sm90_tst_64x8_TNT", "nvjet_sm90_tst_64x8_TNT"),
        ("", ""),
        ("(", "("),
        (")", ")"),
    ],
)
def test_kernels_are_named_without_type_and_parameters(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


@pytest.mark.parametrize(
    ("name", "title"),
    [
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(int)",
            "vectorized_layer_norm_kernel<Half, float>",
        ),
        (
            "cub::CUB_1_NS::Sort<cub::Policy<int>::Policy800, a::b<c::D> >",
            "Sort<Policy<int>::Policy800, b<D>>",
        ),
        (
            "at::elementwise<at::copy(at::Base&)::{lambda()#3}::operator()() const::{lambda(float)#1}>",
            "elementwise<copy(Base&)::{lambda()#3}::operator()() const::{lambda(float)#1}>",
        ),
        ("<unnamed>::f<int>", "f<int>"),
        ("nvjet_sm90_tst_64x8_TNT", "nvjet_sm90_tst_64x8_TNT"),
        ("::", "::"),
        ("at::", "at::"),
        ("", ""),
    ],
)
def test_titles_have_no_namespaces(name: str, title: str) -> None:
    assert kernel_title(name) == title


def test_kernels_of_both_engines_are_the_same_in_a_comparison(tmp_path: Path) -> None:
    def of(name: str, path: str, length_ns: int) -> Any:
        kernels = (
            span(2_000 + at * 1_000, 2_000 + at * 1_000 + length_ns + at % 5, name, "gpu_kernel", gpu=0)
            for at in range(20)
        )
        return load_run(str(write(tmp_path / path, *kernels)))

    cupti = of("void at::native::f<c10::Half>(int, c10::Half*)", "a.jsonl", 500)
    sanitizer = of("at::native::f<c10::Half>", "b.jsonl", 300)
    result = run([lambda: cupti], [lambda: sanitizer], Options()).as_json()
    assert [row["name"] for row in result["lengths"]] == ["at::native::f<c10::Half>"]
    assert not result.get("only")


def test_frames_have_the_short_name(tmp_path: Path) -> None:
    warps = {
        "type": "gpu_warp", "name": "void n::g<int>(int*)", "ts_ns": 0, "gpu": 0,
        "warp": [0], "entry_ns": [5], "exit_ns": [50],
    }  # fmt: skip
    loaded = loader(tmp_path)(span(2_000, 2_100, "void n::f<int>(int*)", "gpu_kernel", gpu=0), warps)
    assert loaded.kernels.select("name").fetchall() == [("n::f<int>",)]
    assert loaded.warps.select("name").fetchall() == [("n::g<int>",)]


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        (
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>, array<char*, 3ul>>",
            "CUDAFunctor_add<BFloat16> (vectorized_elementwise)",
        ),
        (
            "elementwise_kernel<128, 4, gpu_kernel_impl_nocast<BinaryFunctor<Half, Half, Half, M<float>>>"
            "(TensorIteratorBase&, X const&)::{lambda(int)#1}>",
            "M<Half> (elementwise)",
        ),
        (
            "vectorized_elementwise_kernel<4, AUnaryFunctor<float, float, bool, Compare<float>>, A<2>>",
            "Compare<float, scalar> (vectorized_elementwise)",
        ),
        (
            "unrolled_elementwise_kernel<copy(I&)::{lambda()#3}::operator()() const::{lambda(float)#1}, A>",
            "copy<float> (unrolled_elementwise)",
        ),
        (
            "reduce_kernel<512, 1, ReduceOp<X, func_wrapper_t<bool, all(I&)::{lambda(bool, bool)#1}>>>",
            "all<bool> (reduce)",
        ),
        ("elementwise_kernel<1, 2>", "elementwise_kernel<1, 2>"),
        ("elementwise_kernel<gpu_kernel_impl<>(I&)>", "elementwise_kernel<gpu_kernel_impl<>(I&)>"),
        ("elementwise_kernel<{lambda(int)#1}, A>", "elementwise_kernel<{lambda(int)#1}, A>"),
        ("elementwise_kernel<((((", "elementwise_kernel<(((("),
        ("gemm<float>", "gemm<float>"),
    ],
)
def test_kernels_that_apply_a_function_are_called_by_it(title: str, shown: str) -> None:
    assert applied_function(title) == shown
