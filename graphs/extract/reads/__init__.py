"""What the code of a model does besides its ops: reads of values, and effects that no op shows."""
