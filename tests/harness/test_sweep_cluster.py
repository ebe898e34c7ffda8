"""`bench sweep --engine ray`: the records of the local engine, also where a node is lost in the middle."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from decaybench.core.errors import RunError, UserError
from decaybench.harness.progress import Progress
from decaybench.harness.sweep import cluster as cluster_engine
from decaybench.harness.sweep.cluster import RayEngine
from decaybench.harness.sweep.drive import Wish, sweep
from decaybench.harness.sweep.plan import read_plan
from decaybench.models.checkpoints import checkpoints_in
from tests.command import bench
from tests.harness.sweeps import results, write_sweep

LONG = {"training.steps": 400, "checkpoint_seconds": 0.1}
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


class Heard(Progress):
    """Keeps what is said."""

    def __init__(self):
        super().__init__(quiet=True)
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_node_is_lost_and_every_run_ends_once_as_without_ray(tmp_path):
    pytest.importorskip("ray", reason="extra cluster")
    from ray.cluster_utils import Cluster

    path = write_sweep(tmp_path / "s.yaml", LONG, seeds=[0, 1, 2])
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        second = nodes.add_node(**NODE)
        runs = read_plan(path, out=tmp_path / "ray").runs
        lost: list[int] = []

        def lose_a_node():
            # Both of the first two are in the middle: one of them is on the second node.
            while not all(checkpoints_in(run.folder.checkpoint) for run in runs[:2]):
                time.sleep(0.02)
            lost.extend(run.number for run in runs[:2] if not run.evaluation.is_complete())
            nodes.remove_node(second, allow_graceful=False)

        killer = threading.Thread(target=lose_a_node, daemon=True)
        killer.start()
        heard = Heard()
        wish = Wish(path, engine="ray", address=nodes.address, out=tmp_path / "ray", folder=tmp_path / "ray-s")
        done = sweep(wish, progress=heard)
        killer.join(timeout=60)
    finally:
        nodes.shutdown()
    assert lost == [1, 2], "a run ended before the node was lost"
    assert not done.failures and sorted(done.records) == [1, 2, 3]
    [note] = heard.notes
    assert "its worker was lost" in note and "goes on from its last checkpoint" in note
    # Once each: a training that had begun anew or been done twice would have logged a step twice.
    for run in runs:
        steps = [line.split(",")[0] for line in (run.folder.path / "log.jsonl").read_text().splitlines()]
        assert steps[-1] == '{"step": 400' and len(list((run.folder.path / "evaluations").iterdir())) == 1
    alone = bench("sweep", str(path), "--out", str(tmp_path / "local"), "--folder", str(tmp_path / "local-s"))
    assert alone.code == 0 and results(tmp_path / "ray") == results(tmp_path / "local")
    assert (tmp_path / "ray-s/runs.csv").read_bytes() == (tmp_path / "local-s/runs.csv").read_bytes()


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_without_a_cluster_one_is_started_and_stdout_is_the_commands_own(tmp_path):
    pytest.importorskip("ray", reason="extra cluster")
    wild = {"set": {"training.learning_rate": 9.0, "training.clip": None, "training.steps": 400}}
    path = write_sweep(tmp_path / "s.yaml", runs=[wild, {}])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        done = bench("sweep", str(path), "--engine", "ray", "--out", str(tmp_path / "runs"), "--json")
    assert done.code == 1 and done.out.startswith("{") and done.out.endswith("}\n")
    assert "Ray, 1 node" in done.err and "diverged" in done.err.splitlines()[-1]
    assert len(results(tmp_path / "runs")) == 1


def test_without_ray_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write_sweep(tmp_path / "s.yaml")
    done = bench("sweep", str(path), "--engine", "ray", "--out", str(tmp_path / "runs"))
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1] == "bench: --engine ray needs Ray: pip install 'decaybench[cluster]'"


class FakeRay:
    """A cluster of which only its sizes are known."""

    def __init__(self, *nodes):
        self._nodes = nodes

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def cluster_resources(self):
        return {key: sum(node.get(key, 0) for node in self._nodes) for key in ("CPU", "GPU")}

    def remote(self, **options):
        return lambda function: function


@pytest.mark.parametrize(
    ("nodes", "workers", "threads", "gpus", "room"),
    [
        (({"CPU": 4}, {"CPU": 3}), None, 1, None, 7),
        (({"CPU": 4}, {"CPU": 3}), None, 2, None, 3),
        (({"CPU": 4}, {"CPU": 3}), 20, 2, None, 20),  # what has no room waits in Ray, and makes a cluster grow
        (({"CPU": 8, "GPU": 1},), None, 1, None, 1),
        (({"CPU": 8, "GPU": 2},), None, 1, 0.25, 8),
        (({"CPU": 9, "GPU": 2},), None, 1, 0.5, 4),
        (({"CPU": 8, "GPU": 2},), None, 1, 0, 8),
    ],
)
def test_as_many_runs_as_the_cluster_has_room_for(monkeypatch, tmp_path, nodes, workers, threads, gpus, room):
    monkeypatch.setattr(cluster_engine, "_ray", lambda: FakeRay(*nodes))
    with RayEngine(None, workers, threads, gpus, tmp_path) as engine:
        assert engine.room() == room


@pytest.mark.parametrize(
    ("threads", "gpus", "said"),
    [(5, None, "largest node has 4 CPUs"), (1, 0.5, "no node of the Ray cluster has a GPU")],
)
def test_what_no_node_can_take_is_refused(monkeypatch, tmp_path, threads, gpus, said):
    monkeypatch.setattr(cluster_engine, "_ray", lambda: FakeRay({"CPU": 4}, {"CPU": 3}))
    with pytest.raises(UserError, match=said), RayEngine(None, None, threads, gpus, tmp_path):
        pass


def test_a_cluster_that_doesnt_answer_is_told_at_once(tmp_path, monkeypatch):
    """Ray would try for ten minutes."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        began = time.monotonic()
        monkeypatch.setattr(cluster_engine, "_ray", lambda: Silent())
        with pytest.raises(RunError, match=f"the Ray cluster at {address} can't be reached: .*refused"):
            RayEngine(address, None, 1, None, tmp_path).__enter__()
        with pytest.raises(RunError, match="at here can't be reached: an address is host:port"):
            RayEngine("here", None, 1, None, tmp_path).__enter__()
        # What Ray notes of a cluster that was killed is no cluster.
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        (tmp_path / "ray").mkdir()
        assert cluster_engine._on_this_machine() is None
        (tmp_path / "ray/ray_current_cluster").write_text(address)
        assert cluster_engine._on_this_machine() is None
        nobody.listen()
        assert cluster_engine._on_this_machine() == address
        assert time.monotonic() - began < 10


class Silent(FakeRay):
    """None has been joined yet."""

    def is_initialized(self):
        return False
