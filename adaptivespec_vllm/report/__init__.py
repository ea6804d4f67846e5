"""`adaptivespec report`: results of `bench` and `eval` as one page that stands alone."""
