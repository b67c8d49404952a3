"""`python -m jflash.bench`: attention of jflash and of its peers, timed on whatever machine it runs.

cases.py lists the calls, with the functions of one logit of score_mods.py, and peers.py the libraries (in_jax.py and
in_torch.py call them). clocks.py times one piece of work, and measure.py takes the work of a case in turns; limits.py
ends what takes too long. The result is a record (record.py), shown as a table (report.py) and in pictures
(pictures.py).
"""
