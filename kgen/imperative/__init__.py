"""Python control flow over tensors as higher-order operators: `@kgen.control_flow`."""
