# SPDX-License-Identifier: Apache-2.0
# `docker build .` makes kvroute's image: one static binary, which runs as an unprivileged user.
# The target `envoy`, for docker-compose.yaml, is Envoy with the output of `kvroute config envoy $FLAGS`.
FROM docker.io/library/golang:1.26-alpine AS build
WORKDIR /src
COPY . .
RUN mkdir -p -m 1777 /out/tmp && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o /out/kvroute ./cmd/kvroute

FROM build AS bootstrap
ARG FLAGS
RUN /out/kvroute config envoy $FLAGS >/envoy.yaml

FROM docker.io/envoyproxy/envoy:v1.40.0 AS envoy
COPY --from=bootstrap /envoy.yaml /etc/envoy/envoy.yaml

FROM scratch AS kvroute
# The binary, and /tmp for the embedded NATS server.
COPY --from=build /out /
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
USER 65532:65532
ENTRYPOINT ["/kvroute"]
CMD ["serve"]
