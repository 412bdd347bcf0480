# An image that serves a model on CPUs. It was written beside the code, and has not been built by its authors yet.
#
#   docker build -t mainstem .
#   docker run -p 8000:8000 -v mainstem-cache:/cache mainstem                        # SmolLM2-135M-Instruct
#   docker run -p 8000:8000 -v ./my-model:/model:ro mainstem serve /model --host 0.0.0.0
#
# Without a key (MAINSTEM_API_KEY) it answers under localhost and at any IP address; a name, such as that of a service in
# Compose, is allowed with --allowed-host NAME.

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM python:3.12-slim
COPY --from=build /wheel /wheel
COPY constraints.txt /wheel/
RUN pip install --no-cache-dir --constraint /wheel/constraints.txt "$(echo /wheel/*.whl)[server,events,redis]" && rm -r /wheel \
  && useradd --create-home mainstem && mkdir /cache && chown mainstem /cache
USER mainstem
# Models are kept there, converted or as they were downloaded.
ENV XDG_CACHE_HOME=/cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["mainstem"]
CMD ["serve", "--host", "0.0.0.0"]
