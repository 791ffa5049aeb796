# `tfkv` with what `tfkv metrics` needs: no TensorFlow. Built by compose, from the repository's root.
FROM python:3.11-slim
WORKDIR /src
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY tfkv tfkv
COPY layers layers
COPY export export
COPY serving serving
RUN pip install --no-cache-dir --constraint constraints.txt '.[metrics]'
# Elsewhere than the sources, whose folders would be found first.
WORKDIR /
ENTRYPOINT ["tfkv"]
