"""Conformance of templates: problems of every kind for a template, run by it and compared with a float64 reference."""

from kgen.testing.case import Case, Spec
from kgen.testing.cases import cases
from kgen.testing.check import check_template
from kgen.testing.report import Outcome, Report, Result

__all__ = ["Case", "Outcome", "Report", "Result", "Spec", "cases", "check_template"]
