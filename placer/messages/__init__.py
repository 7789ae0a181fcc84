"""The sentences that users read about a result: one function per sentence, "" if it does not apply.

The functions take plain data, and decide by it whether there is something to say.
"""
