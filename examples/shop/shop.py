"""A Django shop in one file, `shop.py runserver`: an order and the job that writes its invoice are committed together
or not at all. Both are rows of one database, written in Django's transaction."""

from __future__ import annotations

import json
import sys

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection, models, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from psycopg.conninfo import conninfo_to_dict
from tasks import write_invoice

from rota import database_url

CREDIT_CENTS = 100_000
place = conninfo_to_dict(database_url())
settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": place.pop("dbname"),
            "OPTIONS": place,
        }
    },
)
django.setup()


class Order(models.Model):
    article = models.CharField(max_length=100)
    cents = models.PositiveIntegerField()
    invoice = models.UUIDField(null=True)

    class Meta:
        app_label = "shop"


def order(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        made = Order.objects.create(**json.loads(request.body))
        made.invoice = write_invoice.sync.on(connection).submit(made.pk, made.article, made.cents).id
        made.save()
        if made.cents > CREDIT_CENTS:
            transaction.set_rollback(True)
            return JsonResponse({"refused": "too dear"}, status=409)
    return JsonResponse({"order": made.pk}, status=202)


def invoice(_request: HttpRequest, number: int) -> JsonResponse:
    job = write_invoice.job(Order.objects.get(pk=number).invoice)
    return JsonResponse({"invoice": job.sync.result(timeout=30)})


urlpatterns = [path("orders", order), path("orders/<int:number>/invoice", invoice)]

if __name__ == "__main__":
    if "shop_order" not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Order)
    execute_from_command_line(sys.argv)
