"""The interface that FLGo requires of a benchmark: the kind of task, and the class that computes."""

from flgo.benchmark.toolkits.cv.classification import FromDatasetGenerator, FromDatasetPipe, GeneralCalculator

from flgo_task import test_data, train_data


class TaskGenerator(FromDatasetGenerator):
    def __init__(self):
        super().__init__(benchmark="flgo_task", train_data=train_data, val_data=None, test_data=test_data)


class TaskPipe(FromDatasetPipe):
    class TaskDataset(FromDatasetPipe.TaskDataset):
        def __getitems__(self, rows):
            """Return several rows. Recent versions of torch require this method, which FLGo's own class lacks."""
            return [self[row] for row in rows]

    def __init__(self, task_path):
        super().__init__(task_path, train_data=train_data, val_data=None, test_data=test_data)


TaskCalculator = GeneralCalculator
