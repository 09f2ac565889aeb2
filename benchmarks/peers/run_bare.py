"""Federated averaging without any framework, the baseline of the speed table.

Two forked processes of one thread each train the clients; weights travel through shared memory, and the mean is formed
in float64.
"""

import sys

import numpy as np
import torch
import torch.multiprocessing as mp
from workload import Work, mark


def main() -> None:
    work = Work(sys.argv[1])
    scale = work.scale
    net = work.model()
    shared = {name: value.contiguous().clone().share_memory_() for name, value in net.state_dict().items()}
    replies = [{name: value.clone().share_memory_() for name, value in shared.items()} for _ in range(scale.per_round)]
    context = mp.get_context("fork")
    todo, done = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=train, args=(work, net, shared, replies, todo, done)) for _ in range(2)]
    for worker in workers:
        worker.start()
    rng = np.random.default_rng(0)
    for number in range(1, scale.rounds + 1):
        for place, client in enumerate(rng.choice(scale.clients, scale.per_round, replace=False)):
            todo.put((place, int(client)))
        for _ in range(scale.per_round):
            done.get()
        for name, value in shared.items():
            total = torch.zeros(value.shape, dtype=torch.float64)
            for reply in replies:
                total += reply[name]
            value.copy_(total / scale.per_round)
        mark(number)
    for _ in workers:
        todo.put(None)
    for worker in workers:
        worker.join()
    work.finish("bare", shared)


def train(work: Work, net, shared, replies, todo, done) -> None:
    torch.set_num_threads(1)
    while (order := todo.get()) is not None:
        place, client = order
        net.load_state_dict(shared)
        work.train(net, client)
        for name, value in net.state_dict().items():
            replies[place][name].copy_(value)
        done.put(place)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
