"""Mangled names of kernels: what compilers write is demangled as others do it, anything else stays."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.kernel_names import short_kernel_name
from tracepipe.mangled_names import demangled, demangled_signature

# By g++: templates, packs, lambdas in lambdas, functions, arrays, literals, unnamed namespaces.
NAMES = {
    "_Z9vectorAddPKfS0_Pf": "vectorAdd",
    "_ZN2ck8gridwiseL6kernelILb1ELj8ELln3EEEvPKc.kd": "ck::gridwise::kernel<true, 8u, -3l>",
    "_ZN2at6native12fused_kernelILi4ENS0_11FillFunctorIiEENS_6detail5ArrayIPcLi1EEEEEviT0_T1_": (
        "at::native::fused_kernel<4, at::native::FillFunctor<int>, at::detail::Array<char*, 1> >"
    ),
    "_ZZZZN2at6native11relu_kernelERNS_18TensorIteratorBaseEENKUlvE_clEvENKUlvE_clEvENKUldE_clEd": (
        "at::native::relu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda()#1}"
        "::operator()() const::{lambda(double)#1}::operator()"
    ),
    "_ZN2at6native12_GLOBAL__N_110gpu_kernelIZZZNS0_11relu_kernelERNS_18TensorIteratorBaseEENKUlvE_clEvENKUlvE_clEv"
    "EUlT_E0_EEvS4_S6_": (
        "at::native::(anonymous namespace)::gpu_kernel<at::native::relu_kernel(at::TensorIteratorBase&)"
        "::{lambda()#1}::operator()() const::{lambda()#1}::operator()() const::{lambda(auto:1)#2}>"
    ),
    "_ZN2at6native12_GLOBAL__N_14packIPFvPA3_iEJEEEvT_DpT0_": (
        "at::native::(anonymous namespace)::pack<void (*)(int (*) [3])>"
    ),
    "_ZN2at6native12_GLOBAL__N_13tupIJiPKfOVcEEEvSt5tupleIJDpT_EE": (
        "at::native::(anonymous namespace)::tup<int, float const*, char volatile&&>"
    ),
    "_ZN2at6native12_GLOBAL__N_12enILNS1_1EE1EfEEvT0_": (
        "at::native::(anonymous namespace)::en<(at::native::(anonymous namespace)::E)1, float>"
    ),
    "_Z1fIL_ZN2at5tableEEEvv": "f<at::table>",
    "_ZNK2at6native2OpILb1ELc97ELln3ELj7EdEclEPFdiRKfERA4_i": (
        "at::native::Op<true, (char)97, -3l, 7u, double>::operator()"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_that_others_show(name: str) -> None:
    assert demangled(name) == NAMES[name]
    if shutil.which("c++filt"):
        asked = subprocess.run(["c++filt", name.removesuffix(".kd")], capture_output=True, text=True)
        assert short_kernel_name(asked.stdout.strip()) == NAMES[name]
        assert demangled_signature(name) == asked.stdout.strip()


def test_a_function_is_a_template_argument() -> None:
    """By hipcc. Older programs that demangle names do not know this form."""
    silu = "TnPFT_RKS3_EXadL_Z4siluIS2_ES3_S5_EE"
    name = f"_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16{silu}EEvPS3_PS4_i"
    function = "silu<__hip_bfloat16>(__hip_bfloat16 const&)"
    assert demangled(name) == f"sgl_hip::activation::act_and_mul_kernel<__hip_bfloat16, &{function}>"


@pytest.mark.parametrize(
    "name",
    [
        "Cijk_Ailk_Bljk_MT64",
        "_Z",
        "_ZN1aIXsr1bEEE",
        "_Z3ab",
        "_Z1fIT0_E",
        "_Z1fIL_Z3fooiEEvv",
        "_Z1fIS\u00b2_E",
        "_ZN" + "1a" * 4000 + "E",
    ],
)
def test_what_is_not_understood_stays(name: str) -> None:
    assert demangled(name) == name


def test_a_name_whose_form_is_exponential_stays() -> None:
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    doubled = "".join(f"S_IS{digit}_S{digit}_E" for digit in digits)
    assert demangled(name := f"_Z1fI1AIiiES_IS0_S0_E{doubled}E") == name
    assert demangled_signature(name) == name


@given(
    st.text("_ZNISTLEKPRFAJUltdcvi0123456789", max_size=60), st.sampled_from(list(NAMES)), st.integers(2, 90)
)
def test_any_text_has_a_short_name(text: str, name: str, at: int) -> None:
    assert len(demangled(name[:at] + text + name[at:])) <= 1 << 13
