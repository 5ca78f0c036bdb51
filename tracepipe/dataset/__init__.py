"""Datasets: the recordings of all ranks of a job as Parquet, on one clock.

    ds/dataset.json                                       what the folder is
    ds/layer=ranks/host=node0/rank=3/part-0.parquet       a row for each rank: written last, when all else is whole
    ds/layer=kernels/host=node0/rank=3/part-0.parquet     a layer of a rank: the tables of `export`, and those here
    ds/layer=alignment/part-0.parquet                     a row for each clock: where it goes on the common one
"""
