# keras_hvd with TensorFlow for NVIDIA's GPUs, out of the folder that its wheel is in: README.md.
FROM debian:12-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --create-home --uid 1000 trainer
ENV PATH=/opt/venv/bin:$PATH

# The large layer comes first: a new wheel of keras_hvd does not renew it.
# CUDA and NCCL are packages of Python's, which TensorFlow asks for.
ARG TENSORFLOW=tensorflow[and-cuda]==2.21.*
ARG PACKAGES=
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$TENSORFLOW" $PACKAGES

RUN --mount=type=bind,target=/dist \
    pip install --no-cache-dir /dist/keras_hvd-*_"$(uname -m)".whl

# The driver is the host's: the parts of it that a container with GPUs gets.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 1000:1000
WORKDIR /home/trainer
# The build ends here where this TensorFlow does not load on this processor, say.
RUN khvdrun --check-build
CMD ["khvdrun", "--check-build"]
