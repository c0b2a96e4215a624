# SPDX-License-Identifier: Apache-2.0
# `docker build .` makes kvroute's image: one static binary, which runs as an unprivileged user. The same sources and the same
# version of Go give the same binary. The targets `envoy` and `real` are for docker-compose.yaml.
FROM docker.io/library/golang:1.26.8-alpine AS build
# What `kvroute version` prints, as in --build-arg VERSION=$(git describe --tags --always); without it: (devel).
ARG VERSION
WORKDIR /src
COPY . .
# grpcnotrace leaves out gRPC's debug pages, which kvroute does not serve.
RUN mkdir -p -m 1777 /out/tmp && CGO_ENABLED=0 go build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "-s -w ${VERSION:+-X github.com/kvroute/kvroute/internal/telemetry.version=$VERSION}" -o /out/kvroute ./cmd/kvroute

# Envoy with the output of `kvroute config envoy $FLAGS`. WORKERS are addresses for its pool.
FROM build AS bootstrap
ARG FLAGS
ARG WORKERS
RUN for w in $WORKERS; do set -- "$@" --pool "$w"; done; /out/kvroute config envoy $FLAGS "$@" >/envoy.yaml

FROM docker.io/envoyproxy/envoy:v1.40.0 AS envoy
COPY --from=bootstrap /envoy.yaml /etc/envoy/envoy.yaml

FROM scratch AS base
# The binary, and /tmp for the embedded NATS server.
COPY --from=build /out /
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
USER 65532:65532
ENTRYPOINT ["/kvroute"]
CMD ["serve"]

# kvroute with a configuration of the engines that .env names.
FROM build AS settings
ARG WORKERS
ARG MODEL
ARG TOKENIZER
ARG ENGINE
ARG EVENTS
# Without .env the stage must not fail, because some builders build all stages. kvroute then refuses the file.
RUN if [ -z "$WORKERS" ] || [ -z "$MODEL" ] || [ -z "$TOKENIZER" ]; then \
      printf 'version: 1\nset WORKERS, MODEL and TOKENIZER in .env, as .env.example says: true\n'; \
    else \
      printf 'version: 1\nmodels:\n- {name: "%s", tokenizer: /model}\nworkers:\n' "$MODEL"; \
      for w in $WORKERS; do \
        printf -- '- {name: "%s", address: "%s", models: ["%s"], engine: %s, health: {}, metrics: {}, events: {transport: %s}}\n' \
          "$w" "$w" "$MODEL" "$ENGINE" "$EVENTS"; \
      done; \
    fi >/kvroute.yaml

FROM base AS real
COPY --from=settings /kvroute.yaml /kvroute.yaml

FROM base AS kvroute
