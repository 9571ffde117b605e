"""Reads a checkpoint in a process that refuses to import tmd."""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Refusal(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] == "tmd":
            raise ImportError("this process reads without tmd")


def main() -> None:
    sys.meta_path.insert(0, Refusal())
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, single = sys.argv[1:]
    body = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2))
    net = nn.ModuleDict({"body": body, "head": nn.Linear(24, 4)})
    net.register_buffer("mask", torch.zeros(24))
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    dcp_to_torch_save(folder, single)
    saved = torch.load(single, weights_only=True)
    for name, value in net.state_dict().items():
        assert torch.equal(value, saved["model"][name]), name
    assert set(saved["optimizer"]["state"]) == {name for name, _ in net.named_parameters()}
    Path(single).with_suffix(".lr").write_text(str(saved["optimizer"]["param_groups"][0]["lr"]))
    assert saved["scheduler"]["last_epoch"] == saved["scheduler"]["_step_count"] - 1
    assert float(net.get_buffer("mask").sum()) == 24


if __name__ == "__main__":
    main()
