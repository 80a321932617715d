"""Test how the suite chooses and configures a GPU or CPU."""

import gc
import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_bench.errors import ConfigurationError, MachineError
from ssl_bench.models import ViTConfig, build_vit
from ssl_bench.system import device as module
from ssl_bench.system import process
from ssl_bench.system.device import (
    PeakMemory,
    RoundedProducts,
    autocast,
    autocast_dtype,
    choose_device,
    describe_device,
    free_gpu_memory,
)
from ssl_bench.system.process import (
    count_usable_cores,
    free_host_memory,
    free_shared_memory,
    is_out_of_memory,
    keep_freed_memory,
    out_of_memory_error,
    pause_garbage_collection,
    read_git_commit,
    source_commit,
    use_passive_openmp_waiting,
)
from tests.support.torchrun import set_torchrun_env
from tests.support.without_torch import REPOSITORY


@pytest.fixture
def two_gpus(monkeypatch):
    current = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    # The replaced check would compute on the device.
    monkeypatch.setattr(module, "_require_usable", torch.device)
    return current


def test_the_requested_device_becomes_the_current_one(two_gpus):
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert two_gpus == [1]
    assert choose_device(None) == torch.device("cuda")
    assert two_gpus == [1]


def test_each_process_of_torchrun_has_its_own_device(two_gpus, monkeypatch):
    set_torchrun_env(monkeypatch, 4, RANK="3", LOCAL_RANK="3")

    assert choose_device(None) == choose_device("cuda") == torch.device("cuda", 3)
    assert choose_device("cpu") == torch.device("cpu")
    assert two_gpus == [3, 3]


def test_tf32_is_off_and_part_of_the_device_description(two_gpus):
    assert describe_device(torch.device("cuda")) == "cuda: H200, TF32 on"
    # In a container, an environment variable may have turned TF32 on.
    torch.backends.cuda.matmul.allow_tf32 = True

    choose_device("cuda")

    assert not torch.backends.cuda.matmul.allow_tf32
    assert describe_device(torch.device("cuda")) == "cuda: H200, TF32 off"


def test_an_unknown_or_missing_device_is_named():
    for name, kind in (("gpu", ConfigurationError), ("meta", MachineError)):
        with pytest.raises(kind, match=name) as raised:
            choose_device(name)
        assert raised.value.hint == ("--device", "cpu")


def test_the_wait_policy_is_set_before_torch_is_imported():
    script = (
        "import os, sys; from ssl_bench.cli.__main__ import main; main(['table', '--out', 'none']);"
        "assert (os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules) == ('PASSIVE', False)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}

    subprocess.run([sys.executable, "-c", script], env=environment, cwd=REPOSITORY, check=True)


@pytest.mark.parametrize("configured", [{}, {"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "x"}])
def test_freed_memory_is_kept_unless_the_user_configures_it(monkeypatch, configured):
    library = SimpleNamespace(calls=[])
    library.mallopt = lambda *arguments: library.calls.append(arguments)
    monkeypatch.setattr("ssl_bench.system.process.ctypes.CDLL", lambda _: library)
    monkeypatch.setattr("os.environ", configured)

    keep_freed_memory()

    assert library.calls == ([] if configured else [(-3, 2**28), (-1, 2**29)])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs the page faults that Linux counts")
def test_large_tensors_reuse_memory():
    script = (
        "import resource, torch; from ssl_bench.system.process import keep_freed_memory;"
        "keep_freed_memory(); torch.ones(2**22); faults = lambda:"
        " resource.getrusage(resource.RUSAGE_SELF).ru_minflt;"
        "before = faults(); [float(torch.ones(2**22)[0]) for _ in range(20)];"
        "print(faults() - before)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=REPOSITORY, capture_output=True
    )
    # A tensor has 4,096 pages. Not all tensors may reuse memory, because small blocks may occupy
    # parts of it.
    assert int(done.stdout) < 10 * 4096


CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(params=["AVX512", "AVX2"])
def processor(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return request.param


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_factors_and_result_are_rounded_to_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    # bfloat16 has 8 binary digits: 1 + 2^-9 becomes 1, 1 + 2^-7 stays.
    left = torch.tensor([[1 + 2**-9, 1 + 2**-7]])
    right = torch.tensor([[1.0], [1 + 2**-7]])
    with autocast(CPU, BFLOAT16):
        product = left @ right
    # 1 + (1 + 2^-7)^2 = 2 + 2^-6 + 2^-14. The last term is rounded away.
    assert product.dtype == BFLOAT16
    assert product.item() == 2 + 2**-6


class ProductDtypes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(part in func.name() for part in ("mm", "conv", "attention", "linear")):
            self.found.add(args[0].dtype)  # pyrefly: ignore[bad-index]
        return func(*args, **(kwargs or {}))


PRODUCTS = {
    "linear": lambda: F.linear(noise(5, 64), noise(3, 64), noise(3)),
    "conv2d": lambda: F.conv2d(noise(2, 3, 8, 8), noise(4, 3, 2, 2), noise(4)),
    "matmul": lambda: noise(4, 64) @ noise(64, 5),
    "bmm": lambda: torch.bmm(noise(2, 4, 64), noise(2, 64, 5)),
    "addmm": lambda: torch.addmm(noise(5), noise(4, 64), noise(64, 5)),
    "baddbmm": lambda: torch.baddbmm(noise(5), noise(2, 4, 64), noise(2, 64, 5)),
    "einsum": lambda: torch.einsum("ij,kj->ik", noise(4, 64), noise(5, 64)),
    "attention": lambda: F.scaled_dot_product_attention(*[noise(2, 2, 9, 32)] * 3),
    "float64": lambda: noise(4, 64).double() @ noise(64, 5).double(),
    "whole numbers": lambda: torch.arange(4)[None] @ torch.arange(4)[:, None],
    "sum": lambda: noise(4, 64) + noise(4, 64),
}
OTHERS = ("float64", "whole numbers", "sum")
"""Operations that autocast does not change."""


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_equal_torch_in_the_precision_of_the_cpu(product, processor):
    with torch.autocast("cpu", BFLOAT16):
        plain = PRODUCTS[product]()
        with RoundedProducts():
            ours = PRODUCTS[product]()
    assert ours.dtype == plain.dtype
    # Half a step of bfloat16 at the largest entry, where a sum falls between two numbers.
    assert (ours - plain).abs().max() <= 2**-7 * plain.abs().max()
    if product not in OTHERS:
        with autocast(CPU, BFLOAT16), ProductDtypes() as mode:
            PRODUCTS[product]()
        assert mode.found == {autocast_dtype(CPU, BFLOAT16)}


def gradients(*contexts):
    config = ViTConfig(image_size=16, patch_size=8, dim=64, depth=3, num_heads=2)
    module, images = build_vit(config, seed=0), noise(4, 3, 16, 16)
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        output = module(images)
    output.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_gradients_of_an_encoder_equal_those_of_torch():
    plain = gradients(torch.autocast("cpu", BFLOAT16))
    ours = gradients(torch.autocast("cpu", BFLOAT16), RoundedProducts())
    assert ours.isfinite().all()
    # The gradients differ only in the order of sums, which is less than the effect of rounding.
    assert (ours - plain).norm() < 0.5 * (gradients() - plain).norm()
    assert (ours - plain).norm() < 0.02 * plain.norm()


def test_nothing_is_rounded_if_autocast_is_disabled(processor):
    expected = noise(4, 64) @ noise(64, 5)
    with autocast(CPU, BFLOAT16), torch.autocast("cpu", enabled=False):
        assert torch.equal(noise(4, 64) @ noise(64, 5), expected)
    with torch.autocast("cpu", BFLOAT16), autocast(CPU, torch.float32):
        assert torch.equal(noise(4, 64) @ noise(64, 5), expected)


def test_bfloat16_is_computed_in_float32_on_older_cpus(processor):
    expected = BFLOAT16 if processor == "AVX512" else torch.float32
    assert autocast_dtype(CPU, BFLOAT16) == expected
    assert autocast_dtype(CPU, torch.float16) == torch.float16
    assert autocast_dtype(torch.device("cuda"), BFLOAT16) == BFLOAT16


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")
def test_peak_memory_includes_only_the_time_since_the_start():
    def use_memory(mib: int) -> None:
        with mmap.mmap(-1, mib << 20) as memory:
            memory.write(b"x" * (mib << 20))

    use_memory(300)
    peak = PeakMemory(torch.device("cpu"))
    before = peak.read()
    use_memory(100)
    after = peak.read()

    assert before is not None
    assert after is not None
    assert 90 << 20 < after - before < 290 << 20


@pytest.mark.parametrize("name", ["clear_refs", "status"])
def test_peak_memory_is_unknown_if_linux_does_not_tell_it(monkeypatch, name):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(path)

    method = {"clear_refs": "write_text", "status": "read_text"}[name]
    monkeypatch.setattr(Path, method, refuse)

    assert PeakMemory(torch.device("cpu")).read() is None


def test_peak_memory_on_a_gpu_is_that_of_tensors(monkeypatch):
    calls = list[torch.device]()
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", calls.append)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: 7)

    assert PeakMemory(torch.device("cuda:1")).read() == 7
    assert calls == [torch.device("cuda:1")]


def test_memory_that_torch_caches_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 25)

    assert free_gpu_memory(torch.device("cuda")) == 10 + 35


def test_half_of_the_memory_counts_as_free_if_unknown(monkeypatch):
    def unknown(path, *_args, **_options):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unknown)

    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_host_memory() == whole // 2


@pytest.mark.parametrize("switch", [gc.disable, gc.enable])
def test_garbage_collection_is_paused_and_then_as_before(switch):
    try:
        switch()
        before = gc.isenabled()
        with pause_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == before
    finally:
        gc.enable()


def test_a_checkout_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert source_commit.__wrapped__() is None


def test_the_commit_comes_from_the_checkout_or_a_packaged_file(monkeypatch, tmp_path):
    package = tmp_path / "ssl_bench"
    package.mkdir()
    monkeypatch.setattr(process, "_PACKAGE", package)
    for content, expected in ((None, None), ("", None), ("abc\n", "abc")):
        if content is not None:
            (package / process.COMMIT_FILE).write_text(content)
        assert source_commit.__wrapped__() == expected
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(process, "read_git_commit", lambda checkout: f"of {checkout}")
    assert source_commit.__wrapped__() == f"of {tmp_path}"


def test_only_changes_of_tracked_files_make_a_checkout_dirty(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        return result.stdout.strip()

    monkeypatch.delenv("GIT_DIR", raising=False)
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    file = tmp_path / "file"
    file.write_text("a")
    git("init", "-q")
    assert read_git_commit(tmp_path) is None
    git("add", "file")
    git("commit", "-qm", "first")
    (tmp_path / "other").touch()
    commit = git("rev-parse", "HEAD")
    assert read_git_commit(tmp_path) == commit
    file.write_text("b")
    assert read_git_commit(tmp_path) == f"{commit}-dirty"


def test_only_the_cores_that_this_process_may_use_are_counted(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert count_usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_usable_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_usable_cores() == 1


@pytest.mark.parametrize("name", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_openmp_threads_sleep_unless_the_user_decides(monkeypatch, name):
    chosen = {} if name is None else {name: "1"}
    monkeypatch.setattr(os, "environ", dict(chosen))
    use_passive_openmp_waiting()
    assert os.environ == (chosen or {"OMP_WAIT_POLICY": "PASSIVE"})


def test_free_shared_memory_is_that_of_users_or_unknown(monkeypatch):
    blocks = SimpleNamespace(f_bavail=3, f_bfree=5, f_frsize=4096, f_bsize=512)
    monkeypatch.setattr(os, "statvfs", {"/dev/shm": blocks}.__getitem__)
    assert free_shared_memory() == 3 * 4096
    monkeypatch.undo()
    monkeypatch.setattr(process, "_SHARED_MEMORY", "/nowhere")
    assert free_shared_memory() is None


def caused_by(cause: BaseException) -> Exception:
    error = ValueError("damaged file")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA Out Of Memory. Tried"), True),
        (caused_by(caused_by(MemoryError())), True),
        (caused_by(OSError("Cannot allocate memory")), True),
        (caused_by(KeyError("x")), False),
        (ValueError("memory"), False),
        (KeyboardInterrupt("out of memory"), False),
        (SystemExit("out of memory"), False),
    ],
)
def test_lack_of_memory_is_recognised_by_type_text_and_cause(error, expected):
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize(
    ("error", "command", "detail", "hint"),
    [
        (MemoryError(), "probe", "MemoryError", "probe.batch_size={smaller}"),
        (RuntimeError("\n CUDA out of memory.\nMore"), "sweep", "CUDA out of memory.", "--jobs"),
        (RuntimeError("x" * 300), "pretrain", "x" * 200, "train.batch_size={smaller}"),
        (MemoryError("no room"), "report", "no room", None),
    ],
)
def test_out_of_memory_errors_have_one_line_and_a_hint(error, command, detail, hint):
    found = out_of_memory_error(error, command)

    assert isinstance(found, MachineError)
    assert str(found).startswith(f"out of memory ({detail})")
    assert next(iter(found.hint), None) == hint
