"""The workload as a benchmark of FLGo: normalised images as tensors in memory."""

import sys

import torch
from torch.utils.data import TensorDataset
from workload import Work

WORK = Work(sys.argv[1])
train_data = TensorDataset(*WORK.images(torch.arange(len(WORK.y))))
test_data = TensorDataset(*WORK.images(torch.arange(100)))
