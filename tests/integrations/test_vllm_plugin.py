"""What vLLM loads in each of its processes, without vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from radixkv.integrations.vllm_plugin import SCHEDULER, check_version, register, register_attention


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1", "1.0"])
def test_versions_that_will_do(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.6.3.post1", "dev", ""])
def test_others_are_refused_by_their_number(version):
    with pytest.raises(ImportError, match=f"vllm: expected version 0.32 or later, got {version}"):
        check_version(version)


@pytest.fixture
def install(monkeypatch):
    """Puts a vLLM in place that has what the plugin asks for; returns its SchedulerConfig."""

    def installed(version, plugins):
        class SchedulerConfig:
            scheduler_cls = None

            def get_scheduler_cls(self):
                return self.scheduler_cls or "vllm's own"

        vllm = ModuleType("vllm")
        vllm.__version__, vllm.envs = version, SimpleNamespace(VLLM_PLUGINS=plugins)
        config = ModuleType("vllm.config")
        config.SchedulerConfig = SchedulerConfig
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setitem(sys.modules, "vllm.config", config)
        return SchedulerConfig

    return installed


@pytest.mark.parametrize("plugins", [None, [], ["another"]])
def test_an_installed_plugin_changes_nothing(install, plugins):
    config = install("0.1.0", plugins)
    register()
    assert config().get_scheduler_cls() == "vllm's own"


def test_a_plugin_that_is_named_is_the_default_scheduler(install):
    config = install("0.32.0", ["another", "radixkv"])
    register()
    register()
    made = config()
    assert made.get_scheduler_cls() == SCHEDULER == made.scheduler_cls
    made.scheduler_cls = "my.own"
    assert made.get_scheduler_cls() == "my.own"


def test_a_plugin_that_is_named_in_a_vllm_that_is_too_old(install):
    install("0.31.0", ["radixkv"])
    with pytest.raises(ImportError, match=r"0\.31\.0"):
        register()


@pytest.mark.parametrize("plugins", [None, ["radixkv"], ["radixkv", "radixkv_attention"]])
def test_attention_is_registered_where_it_is_named(install, monkeypatch, plugins):
    install("0.32.0", plugins)
    attention, calls = ModuleType("radixkv_kernels.integrations.vllm"), []
    attention.register = lambda: calls.append(1)
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    register_attention()
    assert len(calls) == (plugins is not None and "radixkv_attention" in plugins)


def test_attention_that_is_named_in_a_vllm_that_is_too_old(install):
    install("0.31.0", ["radixkv_attention"])
    with pytest.raises(ImportError, match=r"0\.31\.0"):
        register_attention()
