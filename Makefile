# The two commands of this project: `make demo` and `make test`.

.PHONY: demo test
