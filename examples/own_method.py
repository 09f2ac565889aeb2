# Your own method: FedProx in ten lines, compared with FedAvg
#
# Run it from top to bottom (python own_method.py, some seconds), or cell by cell in an editor that knows `# %%`.

# %% A method states only where it differs from FedAvg; its fields are hyper-parameters
from torch import Tensor
from torch.nn import functional as F

import raylt


class MyProx(raylt.Method):
    """FedAvg with mu / 2 |w - w_t|^2 added to each local loss."""

    name = "my_prox"
    paper = "Li et al., MLSys 2020"

    mu: float = raylt.hp(0.1, raylt.LogUniform(1e-4, 1.0), "weight of the proximal term, Eq. 2", ge=0)

    def objective(self, client: raylt.Client, message: raylt.Message) -> raylt.Objective:
        """Return the loss of a batch. Called once a round, right after the global model was received."""
        params = list(client.model.parameters())
        start = [p.detach().clone() for p in params]

        def loss(batch: raylt.Batch) -> Tensor:
            distance = sum((p - p_start).square().sum() for p, p_start in zip(params, start, strict=True))
            return F.cross_entropy(client.model(batch.x), batch.y) + self.mu / 2 * distance

        return loss


# %% Run it and FedAvg, on the same split with the same seed
SHARED = {
    "data": "digits",
    "clients": 6,
    "imbalance": 5,
    "rounds": 5,
    "model": "small",
    "fleet": "local",
    "quiet": True,
    "out": "runs",
}

fedavg = raylt.run("fedavg", name="fedavg", **SHARED)
for mu in (0.0, 0.1, 1.0):
    run = raylt.run(MyProx(mu=mu), name=f"my_prox-{mu}", **SHARED)
    same = run.summary["model_sha256"] == fedavg.summary["model_sha256"]
    print(f"mu = {mu}: accuracy {run.summary['accuracy']['last']:.3f}, the model of FedAvg: {same}")

# %% Save the class as my_prox.py: then `raylt check my_prox.py` tests it against the contract of raylt's methods,
# and `raylt run --plugin my_prox.py method=my_prox` runs it on a cluster.
