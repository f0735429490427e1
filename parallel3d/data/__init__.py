"""Datasets, the order of their samples, and batches that are prefetched."""

from parallel3d.data.batch import Batch as Batch
from parallel3d.data.batches import Batches as Batches
from parallel3d.data.dataset import Dataset as Dataset
from parallel3d.data.dataset import make_dataset as make_dataset
from parallel3d.data.sampler import Sampler as Sampler
