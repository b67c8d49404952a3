"""`python -m jflash.bench`: attention of jflash and of its peers, timed on whatever machine it runs.

cases.py says what is measured, peers.py who is, clocks.py how one piece of work is, and measure.py takes all in turns.
What comes out is a record (record.py), shown as a table (report.py) and in pictures (pictures.py).
"""
