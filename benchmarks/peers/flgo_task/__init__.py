"""The speed table's workload as an FLGo benchmark, with normalised images as tensors in memory."""

import sys

import torch
from torch.utils.data import TensorDataset
from workload import Work

WORK = Work(sys.argv[1])
train_data = TensorDataset(*WORK.images(torch.arange(len(WORK.y))))
test_data = TensorDataset(*WORK.images(torch.arange(100)))
