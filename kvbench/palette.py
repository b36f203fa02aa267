"""Colours of every picture: Okabe and Ito's, distinguishable under the common colour vision deficiencies."""

COLOURS = {
    "token_states": "#009E73",
    "reservation": "#56B4E9",
    "internal_fragmentation": "#E69F00",
    "rounding": "#CC79A7",
    "free": "#DDDDDD",
}
LINES = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000")
