"""The experiment ``attention_kernel``: what paging costs a decode attention kernel.

``settings`` says what is timed, ``problem`` lays it out, ``candidates`` and ``peers`` are what takes turns,
``clock`` times a round, ``experiment`` runs all rounds, ``summary`` makes a table of the samples, ``picture``
draws it.
"""
