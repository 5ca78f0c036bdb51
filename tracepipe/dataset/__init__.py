"""Datasets: the recordings of all ranks of a job as Parquet, on one clock.

ds/dataset.json                                   what the folder is
ds/layer=ranks/host=node0/rank=3/part-0.parquet   a row for each rank, written last
ds/layer=kernels/host=node0/rank=3/part-0.parquet   a layer of a rank: a table of `export`, or one of here
ds/layer=alignment/part-0.parquet                 a row for each clock: where it goes on the common one
"""
