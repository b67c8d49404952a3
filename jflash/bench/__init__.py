"""`python -m jflash.bench`: attention of jflash and of its peers, timed on whatever machine it runs.

cases.py lists the calls and peers.py the libraries (in_jax.py and in_torch.py call them). clocks.py times one piece of
work, and measure.py takes all of them in turns. The result is a record (record.py), shown as a table (report.py) and in
pictures (pictures.py).
"""
